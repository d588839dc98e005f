"""Layouts of published data sets (verl, TRL, OpenRLHF, ...): finds columns of prompt and answer
that no key names; reads a column by its name, with dots for what is inside; and `Rows`, what
readers of files offer.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_rl.config import ConfigError

SUFFIXES = (".parquet", ".jsonl", ".arrow")  # of files whose rows are read
DEPTH = 64  # levels of a row's nesting


class Rows(ABC, Sequence[dict[str, Any]]):
    @abstractmethod
    def place(self, index: int) -> str: ...  # where a row stands: `line 41 of FILE`

    def pairs(self, one: str, other: str) -> Iterator[tuple[str | None, str | None]] | None:
        """Two text columns, if they can be read alone, which is much faster; otherwise None."""
        return None


@dataclass(frozen=True)
class Layout:
    prompt: str
    answer: str
    publisher: str = "as configured"


# In this order: what names itself most clearly comes first.
LAYOUTS = (
    Layout("prompt", "reward_model.ground_truth", "as verl has it"),
    Layout("prompt", "answer", "as here"),
    Layout("prompt", "label", "as slime has it"),
    Layout("prompt", "ground_truth", "as TRL has it"),
    Layout("prompt", "solution", "as TRL has it"),
    Layout("problem", "expected_answer", "as NeMo-RL has it"),
    Layout("input", "output", "as NeMo-RL has it"),
    Layout("input", "label", "as OpenRLHF has it"),
    Layout("input", "answer", "as OpenRLHF has it"),
    Layout("context_messages", "answer", "as OpenRLHF has it"),
    Layout("question", "answer", "as OpenRLHF has it"),
    Layout("problem", "answer", "as DeepScaleR and AIME have it"),
    Layout("problem", "solution", "as MATH has it"),
)
_CONVERSATION = Layout("messages", "messages", "as NeMo-RL has it")  # which ends with the answer


def field(row: Mapping[str, Any], name: str) -> Any:
    """The column `name`, or, with dots, a value inside a column. LookupError lists the columns."""
    if name in row:
        return row[name]
    found: Any = row
    passed: list[str] = []
    for part in name.split("."):
        if not isinstance(found, Mapping) or part not in found:
            if isinstance(found, Mapping):
                there = ", ".join(map(str, found)) or "nothing"
            else:
                there = type(found).__name__
            raise LookupError(f"{'.'.join(passed) or 'it'} has {there}")
        found = found[part]
        passed.append(part)
    return found


def has(row: Mapping[str, Any], name: str) -> bool:
    try:
        return field(row, name) is not None
    except LookupError:
        return False


def recognised(
    row: Mapping[str, Any], prompt_key: str | None, answer_key: str | None, where: str
) -> Layout:
    """The layout of a data set, by its first row and what the configuration says."""
    if prompt_key is not None and answer_key is not None:
        return Layout(prompt_key, answer_key)
    fitting = [
        one
        for one in LAYOUTS
        if prompt_key in (None, one.prompt) and answer_key in (None, one.answer)
    ]
    for one in fitting:
        if has(row, one.prompt) and has(row, one.answer):
            return one
    if prompt_key is None and answer_key is None and _ends_with_answer(row.get("messages")):
        return _CONVERSATION
    prompts = dict.fromkeys(one.prompt for one in LAYOUTS)
    prompt = prompt_key or next((name for name in prompts if has(row, name)), None)
    if prompt is None:
        raise ConfigError(
            f"data.prompt_key: {where} has {', '.join(map(str, row)) or 'nothing'}, none of which "
            f"is known to hold prompts ({', '.join(prompts)}, messages); name the column, with "
            "dots for a value inside one"
        )
    return Layout(prompt, answer_key or "answer", "no answers were found")


def _ends_with_answer(messages: Any) -> bool:
    if not isinstance(messages, list) or len(messages) < 2 or not isinstance(messages[-1], Mapping):
        return False
    return messages[-1].get("role") == "assistant"


def split(row: dict[str, Any], layout: Layout) -> tuple[dict[str, Any], Layout]:
    """A conversation that ends with the answer, in two columns; any other row as it is."""
    if layout is not _CONVERSATION or not _ends_with_answer(row.get("messages")):
        return row, layout
    *prompt, answer = row["messages"]
    return {**row, "prompt": prompt, "answer": answer.get("content")}, Layout(
        "prompt", "answer", layout.publisher
    )
