"""Table of metrics (metrics.yaml): every name that a run may log, its reducer, unit and meaning;
look-ups by name.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import yaml

from megatron_rl.config.schema import Format

ACCURACY = "eval/accuracy"
TURNS = 4  # of a session, that have metrics of their own
_OF_A_SET = re.compile(r"eval/(?:([\w-]+)/)?([a-z_]+)(@\d+)?(_stderr)?")
PARTS = {  # of the compared tokens
    **{str(format): f"tokens that {format} servers of a mixed fleet sampled" for format in Format},
    "fresh": "tokens of the learner's own policy version, in a step that has older ones too: numerics alone",
    "stale": "tokens of older versions: numerics, and the steps since",
    "first_turn": "tokens of the first turn of each conversation",
    "middle_turns": "tokens of the turns between the first and the last",
    "last_turn": "tokens of the last turn, if there are several",
    "turn_start": "the first token of each turn",
    "turn_end": "the last token of each turn: its stop token unless truncated",
}


class UnknownMetricWarning(UserWarning):
    """A name that is not in the table was logged. Tests turn this into an error."""


@dataclass(frozen=True)
class Metric:
    name: str
    meaning: str
    reducer: str = "mean"  # over the parts of one step: minibatches, generation calls
    unit: str = ""


def _read_table() -> dict[str, Metric]:
    text = Path(__file__).with_name("metrics.yaml").read_text(encoding="utf-8")
    found = {}
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # in C: every start reads it
    for group, rows in yaml.load(text, Loader=loader).items():
        fields: list[dict[str, str]] = [{}]
        if "{turn}" in group:
            fields = [{"turn": str(turn)} for turn in range(TURNS)]
        elif "{part}" in group:
            fields = [{"part": part, "tokens": tokens} for part, tokens in PARTS.items()]
        for each in fields:
            for row, (meaning, *rest) in rows.items():
                name = f"{group}/{row}".format(**each)
                found[name] = Metric(name, meaning.format(**each), *rest)
    return found


METRICS = _read_table()


def row(name: str) -> Metric | None:
    """The row of a name, or of all names of its kind."""
    kinds = (name, f"{name.rpartition('/')[0]}/*", eval_row(name))
    return next((METRICS[kind] for kind in kinds if kind in METRICS), None)


def eval_row(name: str) -> str:
    """eval/aime/pass@8 -> eval/pass@K: of any set, and any number of samples."""
    found = _OF_A_SET.fullmatch(name)
    if found is None:
        return name
    return f"eval/{found[2]}{'@K' if found[3] else ''}{found[4] or ''}"


def accuracies(names: Iterable[str]) -> dict[str, str]:
    """Metric -> name of the set, for all sets that were evaluated; data.eval first."""
    found = {name: _OF_A_SET.fullmatch(name) for name in names}
    sets = {
        name: match[1] or "eval"
        for name, match in found.items()
        if match and eval_row(name) == ACCURACY
    }
    return dict(sorted(sets.items(), key=lambda item: (item[0] != ACCURACY, item[0])))


def unknown(names: Iterable[str]) -> list[str]:
    return sorted(name for name in names if row(name) is None)
