"""The toy: arithmetic with a character tokenizer, and a model of under a million parameters.

Everything is made from a seed, so that a machine without network runs the whole chain. The model is a
Qwen3 as large ones are (grouped queries, q/k norms, SwiGLU), only small.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PAD, END = "<pad>", "<end>"
CHARACTERS = "0123456789+-*= "
SHRUNK = frozenset(
    {
        "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
        "intermediate_size", "max_position_embeddings", "num_experts", "num_local_experts", "num_experts_per_tok",
        "moe_intermediate_size",
    }
)  # fmt: skip


@dataclass(frozen=True)
class ToyTask:
    """`a+b=` for every a from `smallest` to `largest` and b up to `largest_second`; `held_out` of them are never
    trained on. An answer of several `terms` applies `+b` again to each: 127+8= is 135 143 151 ...
    """

    smallest: int = 0
    largest: int = 999
    largest_second: int = 9
    operators: str = "+"
    terms: int = 1
    held_out: int = 256
    seed: int = 1

    def problems(self) -> list[dict[str, str]]:
        return [
            {"prompt": f"{a}{operator}{b}=", "answer": " ".join(self._answers(a, operator, b))}
            for operator in self.operators
            for a in range(self.smallest, self.largest + 1)
            for b in range(self.largest_second + 1)
        ]

    def _answers(self, a: int, operator: str, b: int) -> Iterator[str]:
        for _ in range(self.terms):
            a = _apply(a, operator, b)
            yield str(a)


def _apply(a: int, operator: str, b: int) -> int:
    return {"+": a + b, "-": a - b, "*": a * b}[operator]


COUNTING = ToyTask(smallest=100, largest=900, terms=8)
SLIPS = 0.1  # of the terms that a warm start imitates


def with_slips(row: Mapping[str, str], share: float, draw: random.Random) -> dict[str, str]:
    """The row as somebody answers who is off by one in this share of the terms, and counts on from there."""
    terms, off = [], 0
    for term in map(int, row["answer"].split()):
        off += draw.choice((-1, 1)) if draw.random() < share else 0
        terms.append(str(term + off))
    return {**row, "answer": " ".join(terms)}


@dataclass(frozen=True)
class ToyShape:
    hidden: int = 128
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    ffn: int = 256
    tied: bool = True
    context: int = 64


def write_counting(folder: Path) -> dict[str, int]:
    """Beside what is right, `slips.jsonl`: the answers of train.jsonl, to be imitated."""
    counts, draw = write_toy(folder, COUNTING), random.Random(COUNTING.seed)
    with (folder / "train.jsonl").open() as rows, (folder / "slips.jsonl").open("w") as slips:
        slips.writelines(json.dumps(with_slips(json.loads(row), SLIPS, draw)) + "\n" for row in rows)
    return counts


def write_toy(
    folder: Path, task: ToyTask | None = None, shape: ToyShape | None = None, like: Mapping[str, Any] | None = None
) -> dict[str, int]:
    """Writes `model/` (config and tokenizer, no weights), `train.jsonl` and `test.jsonl`.

    `like`: config.json of a large model, of whose family the small one is then.
    """
    task, shape = task or ToyTask(), shape or ToyShape()
    problems = task.problems()
    random.Random(task.seed).shuffle(problems)
    test, train = problems[: task.held_out], problems[task.held_out :]
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in (("train", train), ("test", test)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_tokenizer(folder / "model")
    config = hf_config(shape) if like is None else shrunk(like)
    (folder / "model" / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return {"train": len(train), "test": len(test)}


def shrunk(card: Mapping[str, Any]) -> dict[str, Any]:
    """A model of the same family, of sizes that two cores train; its four layers divide over a pipeline."""
    shape = ToyShape(layers=4, tied=bool(card.get("tie_word_embeddings")))
    sizes = hf_config(shape) | {
        "num_experts": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
    }
    tokens = {key: value for key, value in sizes.items() if key.endswith("_token_id")}
    return {key: sizes[key] if key in SHRUNK else value for key, value in card.items()} | tokens


def vocabulary() -> dict[str, int]:
    return {token: index for index, token in enumerate([PAD, END, *CHARACTERS])}


def write_tokenizer(folder: Path) -> None:
    """A tokenizer.json that splits text into characters."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel(vocabulary(), unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(PAD, special=True), AddedToken(END, special=True)])
    save_tokenizer(tokenizer, folder, pad_token=PAD, eos_token=END)


def save_tokenizer(tokenizer: Any, folder: Path, **settings: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(about, indent=2) + "\n")


def hf_config(shape: ToyShape) -> dict[str, Any]:
    tokens = vocabulary()
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": len(tokens),
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.ffn,
        "hidden_act": "silu",
        "max_position_embeddings": shape.context,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": shape.tied,
        "initializer_range": 0.02,
        "use_cache": True,
        "torch_dtype": "bfloat16",
        "pad_token_id": tokens[PAD],
        "bos_token_id": None,
        "eos_token_id": tokens[END],
    }
