"""Bounds of configuration values, written in the key's type (`workers: Annotated[int, at_least(1)]
= 1`), also of keys in maps for megatron-core and vLLM; shape.py applies them. `as_written`: a value
as messages show it; `did_you_mean`: the known name closest to a misspelt one.
"""

import difflib
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

AUTO = "auto"
LARGEST = sys.float_info.max
LONGEST_NAME = 255  # bytes, of a file
SET_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
MINUTES = "min"
WEEK_S = 7 * 24 * 3600


@dataclass(frozen=True)
class Bound:
    holds: Callable[[Any], bool]
    words: str  # the values that it allows
    hint: str


class Inside(dict[str, Bound]):
    """Bounds of keys in a map for megatron-core or vLLM, which validate the others."""


def at_least(least: float, expected: str = "") -> Bound:
    return expect(lambda value: value >= least, expected or f"{least:g} or more")


def above(floor: float, expected: str = "") -> Bound:
    return expect(lambda value: value > floor, expected or f"above {floor:g}")


def between(least: float, most: float, expected: str = "") -> Bound:
    return expect(
        lambda value: least <= value <= most, expected or f"{least:g} or more, at most {most:g}"
    )


def expect(holds: Callable[[Any], bool], expected: str) -> Bound:
    return Bound(holds, expected, f"expected {expected}")


def need(holds: Callable[[Any], bool], hint: str) -> Bound:
    return Bound(holds, hint, hint)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST


def is_interval(value: Any) -> bool:
    """Return True for steps, or minutes such as 30min."""
    if isinstance(value, int):
        return value >= 0
    return re.fullmatch(rf"\d+(\.\d+)?{MINUTES}", value) is not None


def is_weight(value: Any) -> bool:
    return is_number(value) and value > 0


def is_source(value: Any) -> bool:
    """Return True for a file, or several with a weight above 0 each."""
    return is_reward(value, is_weight)


def is_reward(value: Any, weighs: Callable[[Any], bool] = is_number) -> bool:
    """Return True for a name, or several with a weight each."""
    if isinstance(value, Mapping):
        return bool(value) and all(
            isinstance(name, str) and weighs(weight) for name, weight in value.items()
        )
    return isinstance(value, str)


def are_modules(entries: Iterable[str]) -> bool:
    """Return True for names of modules, and regular expressions after re:."""
    try:
        for entry in entries:
            re.compile(entry[3:] if entry.startswith("re:") else "")
    except (re.error, OverflowError, RecursionError):
        return False
    return True


def are_set_names(sets: Iterable[str]) -> bool:
    return all(SET_NAME.fullmatch(name) for name in sets)


def is_folder_name(name: str) -> bool:
    """Return True for a single path component that is safe in every file system and command."""
    return (
        name.isprintable()
        and name.strip(" ") == name
        and "/" not in name
        and not name.startswith("-")
        and name not in ("", ".", "..")
        and len(os.fsencode(name)) <= LONGEST_NAME
    )


FOLDER_NAME = Bound(
    is_folder_name,
    "names one folder",
    "it names one folder; use letters, digits and any of . _ - after the first character, at most "
    f"{LONGEST_NAME} bytes",
)
SHARE = expect(lambda value: 0 <= value < 1, "0 (off) to below 1")
SIZE = expect(lambda value: type(value) is int and value >= 1, "a whole number of 1 or more")

# keys of the maps that vLLM, megatron-core's OptimizerConfig and its TransformerConfig are handed
VLLM = Inside(
    max_num_seqs=SIZE,
    kv_cache_memory_bytes=SIZE,
    max_model_len=SIZE,
    max_num_batched_tokens=SIZE,
    gpu_memory_utilization=expect(
        lambda share: 0 < share <= 1, "a share of the memory, above 0 and at most 1"
    ),
)
OPTIMIZER = Inside(
    bucket_size=SIZE,
    clip_grad=at_least(0, "0 (off) or more"),
    weight_decay=at_least(0),
    adam_beta1=SHARE,
    adam_beta2=SHARE,
    adam_eps=above(0, "above 0, such as 1e-8"),
)
TRANSFORMER = Inside(
    virtual_pipeline_model_parallel_size=SIZE,
    expert_tensor_parallel_size=SIZE,
    num_layers_in_first_pipeline_stage=SIZE,
    num_layers_in_last_pipeline_stage=SIZE,
    hidden_dropout=SHARE,
    attention_dropout=SHARE,
)

Positive = Annotated[int, at_least(1)]
Count = Annotated[int, at_least(0)]
Ranks = Annotated[int, between(1, 4096)]
Samples = Annotated[int, between(1, 65536)]
Seconds = Annotated[
    float, expect(lambda value: 0 < value <= WEEK_S, f"seconds: above 0, at most a week ({WEEK_S})")
]
Nucleus = Annotated[float, expect(lambda share: 0 < share <= 1, "above 0, at most 1 (off)")]
Coefficient = Annotated[float, need(lambda value: value >= 0, "use 0 or more")]
Temperature = Annotated[float, between(0, 2, "0 (greedy) to 2")]
Shape = Annotated[  # of vespo's weight
    list[float],
    need(
        lambda shape: len(shape) == 2 and min(shape) > 0,
        "use two numbers above 0, a power and the rate of its fall",
    ),
]
Tau = Annotated[float, need(lambda value: value > 0, "use a temperature above 0")]


def as_written(value: object) -> str:
    """Format a value for messages, nearly as YAML writes it."""
    if value is None:
        return "null"
    if isinstance(value, str):
        if value in ("", "null") or value != value.strip() or not value.isprintable():
            return repr(value)
        return value
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)


def did_you_mean(
    name: str, known: Iterable[str], words: str = "did you mean {}?", cutoff: float = 0.6
) -> str:
    """Format the known name closest to `name` with `words`; return "" if none is close."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return words.format(*near) if near else ""
