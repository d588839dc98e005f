"""A small real task: questions of reasoning-gym in a chat template, a byte-level BPE tokenizer trained on them, and a
model of 2.4 million parameters. Everything is made from a seed, without a network.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_rl.data.toy import ToyShape, hf_config, save_tokenizer

TASK = "chain_sum"
SETTINGS = {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1, "allow_negation": False}
DRAWN, TEST = 12_000, 256  # two of three are there already
VOCABULARY = 512
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SHAPE = ToyShape(hidden=256, layers=4, heads=8, kv_heads=2, head_dim=32, ffn=512, context=128)


def entries(tasks: Sequence[str], count: int, seed: int, settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Name and row of every question; the same each time."""
    import reasoning_gym

    for task in tasks:
        for entry in reasoning_gym.create_dataset(task, size=count, seed=seed, **settings):
            yield task, entry


def write_reasoning(folder: Path) -> dict[str, int]:
    """Writes `model/` (config and tokenizer, no weights), `train.jsonl` and `test.jsonl`, which share no question."""
    rows: dict[str, dict[str, Any]] = {}
    for _, entry in entries([TASK], DRAWN, 1, SETTINGS):
        rows.setdefault(entry["question"], {"prompt": entry["question"], **entry})
    test, train = list(rows.values())[:TEST], list(rows.values())[TEST:]
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in (("train", train), ("test", test)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    write_tokenizer(folder / "model", (f"user\n{row['question']}\nassistant\n{row['answer']}" for row in train))
    return {"train": len(train), "test": len(test)}


def write_tokenizer(folder: Path, texts: Iterator[str]) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = [PAD, START, END]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    save_tokenizer(tokenizer, folder, pad_token=PAD, eos_token=END, chat_template=TEMPLATE)
    tokens = {"vocab_size": VOCABULARY, "pad_token_id": 0, "eos_token_id": special.index(END)}
    (folder / "config.json").write_text(json.dumps(hf_config(SHAPE) | tokens, indent=2) + "\n")
