"""Generator of small tasks for machines without network: rows to train and test on, tokenizer and
config.json of a tiny model. The toys are arithmetic and counting (a tokenizer of characters, under
a million parameters); questions of reasoning-gym come with a chat template, a byte-level BPE
tokenizer trained on them, and 2.4 million. All by a seed.
"""

import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.config import ConfigError
from megatron_rl.files import JsonObject, read_bounded, write_atomic, write_json

PAD = "<pad>"
END = "<end>"
CHARACTERS = "0123456789+-*= "
VOCABULARY = {token: index for index, token in enumerate([PAD, END, *CHARACTERS])}
REASONING = "chain_sum"
REASONING_SETTINGS = {
    "min_terms": 2,
    "max_terms": 3,
    "min_digits": 1,
    "max_digits": 1,
    "allow_negation": False,
}
# two of three are drawn again
QUESTIONS_DRAWN = 12_000
HELD_OUT = 256
BPE_VOCABULARY = 512
TEXT_END = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content "
    "}}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SHRUNK = frozenset(
    {
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "intermediate_size",
        "max_position_embeddings",
        "num_experts",
        "num_local_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
    }
)


@dataclass(frozen=True)
class ToyTask:
    """`a+b=` for every a from `smallest` to `largest` and b up to `largest_second`; `held_out` of
    them are never trained on. An answer of several `terms` adds b again to each: 127+8= is 135 143
    151 ...
    """

    smallest: int = 0
    largest: int = 999
    largest_second: int = 9
    terms: int = 1
    held_out: int = 256
    seed: int = 1

    def problems(self) -> list[dict[str, str]]:
        return [
            {
                "prompt": f"{a}+{b}=",
                "answer": " ".join(str(a + b * term) for term in range(1, self.terms + 1)),
            }
            for a in range(self.smallest, self.largest + 1)
            for b in range(self.largest_second + 1)
        ]


ADDITION = ToyTask()
COUNTING = ToyTask(smallest=100, largest=900, terms=8)
SLIPS = 0.1  # of the terms that a warm start imitates


def with_slips(row: Mapping[str, str], share: float, draw: random.Random) -> dict[str, str]:
    """The row with wrong terms: this share of them is off by one, and so are all that follow."""
    terms = []
    off = 0
    for term in map(int, row["answer"].split()):
        if draw.random() < share:
            off += draw.choice((-1, 1))
        terms.append(str(term + off))
    return {**row, "answer": " ".join(terms)}


def write_counting(folder: Path, like: Mapping[str, Any] | None = None) -> dict[str, int]:
    """Write the counting task, and `slips.jsonl`: train.jsonl with errors, for warm starts."""
    counts = write_toy(folder, COUNTING, like=like)
    draw = random.Random(COUNTING.seed)
    rows = map(json.loads, (folder / "train.jsonl").read_text().splitlines())
    write_rows(folder, slips=[with_slips(row, SLIPS, draw) for row in rows])
    return counts


def write_toy(
    folder: Path, task: ToyTask = ADDITION, like: Mapping[str, Any] | None = None
) -> dict[str, int]:
    """Write `model/` without weights, `train.jsonl`, `test.jsonl`. `like`: a model's config."""
    problems = task.problems()
    random.Random(task.seed).shuffle(problems)
    test = problems[: task.held_out]
    train = problems[task.held_out :]
    counts = write_rows(folder, train=train, test=test)
    config = hf_config() if like is None else shrunk(like)
    _write(folder / "model" / "config.json", json.dumps(config, indent=2) + "\n")
    write_tokenizer(folder / "model")
    return counts


def write_rows(folder: Path, **files: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Writes NAME.jsonl of each, and counts its rows."""
    for name, rows in files.items():
        _write(folder / f"{name}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    return {name: len(rows) for name, rows in files.items()}


def _write(path: Path, text: str) -> None:
    if path.exists() and read_bounded(path) != text.encode():
        raise ConfigError(
            f"{path} is there already, with other content: remove it, or name another folder"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, text)


def shrunk(card: Mapping[str, Any]) -> JsonObject:
    """Config of a small model of the same family, for two cores; four layers allow a pipeline."""
    sizes = hf_config() | {
        "num_hidden_layers": 4,
        "num_experts": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
    }
    tokens = {key: value for key, value in sizes.items() if key.endswith("_token_id")}
    return {key: sizes[key] if key in SHRUNK else value for key, value in card.items()} | tokens


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer.json that splits text into characters, readable by every family's class."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    spelled = {token.replace(" ", "Ġ"): number for token, number in VOCABULARY.items()}
    tokenizer = Tokenizer(models.BPE(spelled, [], unk_token=PAD))
    tokenizer.pre_tokenizer = as_bytes
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(PAD, special=True), AddedToken(END, special=True)])
    save_tokenizer(tokenizer, folder, pad_token=PAD, eos_token=END)


def save_tokenizer(tokenizer: Any, folder: Path, **settings: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / "tokenizer.json", tokenizer.to_str(pretty=True))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", **settings}
    write_json(folder / "tokenizer_config.json", about)


def hf_config() -> JsonObject:
    """Config of the model of the toys."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": len(VOCABULARY),
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 256,
        "hidden_act": "silu",
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
        "use_cache": True,
        "torch_dtype": "bfloat16",
        "pad_token_id": VOCABULARY[PAD],
        "bos_token_id": None,
        "eos_token_id": VOCABULARY[END],
    }


def entries(
    tasks: Sequence[str], count: int, seed: int, settings: Mapping[str, Any]
) -> Iterator[tuple[str, Any]]:
    """Task and row of every question of reasoning-gym; the same each time."""
    import reasoning_gym

    for task in tasks:
        for entry in reasoning_gym.create_dataset(task, size=count, seed=seed, **settings):
            yield task, entry


def write_reasoning(folder: Path) -> dict[str, int]:
    """Write `model/` (no weights), and disjoint `train.jsonl` and `test.jsonl`."""
    rows: dict[str, JsonObject] = {}
    for _, entry in entries([REASONING], QUESTIONS_DRAWN, 1, REASONING_SETTINGS):
        rows.setdefault(entry["question"], {"prompt": entry["question"], **entry})
    test = list(rows.values())[:HELD_OUT]
    train = list(rows.values())[HELD_OUT:]
    write_chat_tokenizer(
        folder / "model", (f"user\n{row['question']}\nassistant\n{row['answer']}" for row in train)
    )
    return write_rows(folder, train=train, test=test)


def write_chat_tokenizer(folder: Path, texts: Iterable[str]) -> None:
    """Write a byte-level BPE tokenizer trained on `texts`, with chat template and config.json."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [TEXT_END, TURN_START, TURN_END]
    trainer = trainers.BpeTrainer(
        vocab_size=BPE_VOCABULARY,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    save_tokenizer(
        tokenizer, folder, pad_token=TEXT_END, eos_token=TURN_END, chat_template=CHAT_TEMPLATE
    )
    config = hf_config() | {
        "vocab_size": BPE_VOCABULARY,
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "intermediate_size": 512,
        "max_position_embeddings": 128,
        "pad_token_id": 0,
        "eos_token_id": special.index(TURN_END),
    }
    write_json(folder / "config.json", config)
