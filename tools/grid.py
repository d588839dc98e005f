"""A grid of runs: one recipe, some axes of overrides, some seeds. docs/experiments/evidence.md describes the
file.

`read` takes a grid file; a recipe with a list of corrections is a grid of one axis.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from megatron_rl.apps.quickstart import TASKS
from megatron_rl.config import ConfigError
from megatron_rl.config.bounds import SET_NAME
from megatron_rl.config.plain_yaml import read_yaml

KEYS = (
    "base",
    "task",
    "outliers",
    "seeds",
    "axes",
    "leave_out",
    "sizes",
    "reference",
    "bf16_samples",
)
SIZES = ("subset", "default", "full")
OWN_KEYS = ("run.name", "run.root", "run.seed")  # of a run, which the grid sets


@dataclass(frozen=True)
class Outliers:
    """Put into the weights that every run starts from: `outliers.py`."""

    factor: int
    channels: int


@dataclass(frozen=True)
class Experiment:
    """A run of a cell."""

    name: str
    labels: tuple[str, ...]
    seed: int | None
    overrides: tuple[str, ...]


Selection = Mapping[str, Sequence[str]]  # axis -> labels


@dataclass(frozen=True)
class Grid:
    group: str
    recipe: Path
    axes: Mapping[str, Mapping[str, Sequence[str]]]  # axis -> label -> overrides
    seeds: Sequence[int] = ()  # none: the recipe's own
    leave_out: Sequence[Selection] = ()
    sizes: Mapping[str, Mapping[str, Sequence[Any]]] = field(default_factory=dict)
    reference: tuple[str, ...] | None = None
    task: str | None = None  # of quickstart.TASKS: its data, and its warm start once for each seed
    outliers: Outliers | None = None
    # responses to each held-out prompt by a run's last policy in a BF16 engine; 0: no such evaluation
    bf16_samples: int = 0

    def experiments(self, size: str = "default") -> list[Experiment]:
        """Seeds outermost: after every round, each cell has been seen equally often."""
        chosen = self.sizes.get(size, {})
        seeds = [seed for seed in self.seeds if seed in chosen.get("seeds", self.seeds)]
        return [
            self._experiment(labels, seed)
            for seed in (seeds if self.seeds else [None])
            for labels in itertools.product(*self.axes.values())
            if self._covers(chosen, labels)
            and not any(self._covers(one, labels) for one in self.leave_out)
        ]

    def _covers(self, selection: Mapping[str, Sequence[Any]], labels: Sequence[str]) -> bool:
        return all(
            label in selection.get(axis, (label,))
            for axis, label in zip(self.axes, labels, strict=True)
        )

    def _experiment(self, labels: tuple[str, ...], seed: int | None) -> Experiment:
        name = "_".join(
            [
                self.group,
                *labels,
                *([] if seed is None else [f"s{seed}"]),
            ]
        )
        overrides = [
            one
            for axis, label in zip(self.axes, labels, strict=True)
            for one in self.axes[axis][label]
        ]
        return Experiment(
            name, labels, seed, (*overrides, *([] if seed is None else [f"run.seed={seed}"]))
        )


def tags(experiment: Experiment, axes: Mapping[str, object]) -> dict[str, str]:
    """For W&B: the labels of a run, in its environment."""
    return {
        "WANDB_TAGS": ",".join(
            f"{axis}:{label}" for axis, label in zip(axes, experiment.labels, strict=True)
        )
    }


def of_corrections(
    recipe: Path, group: str, corrections: Sequence[str], seeds: Sequence[int]
) -> Grid:
    return Grid(
        group, recipe, {"correction": {name: [f"correction={name}"] for name in corrections}}, seeds
    )


def is_grid(path: Path) -> bool:
    """True for a file that has axes; what cannot be read is no grid."""
    try:
        return "axes" in read_yaml(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError, yaml.YAMLError):
        return False


def read(path: Path, group: str | None = None, seeds: Sequence[int] = ()) -> Grid:
    """A grid file, all of whose mistakes are named at once. `group`, `seeds`: in the place of its
    own.
    """
    content = read_yaml(path.read_text(encoding="utf-8"))
    if found := list(_problems(content, path)):
        raise ConfigError("\n".join(f"{path}: {line}" for line in found))
    reference = content.get("reference")
    outliers = content.get("outliers")
    grid = Grid(
        group or path.stem,
        path.parent / content["base"],
        content["axes"],
        seeds or content.get("seeds", ()),
        [_selection(one) for one in content.get("leave_out") or ()],
        {
            size: _selection(one, "seeds" if seeds else None)
            for size, one in (content.get("sizes") or {}).items()
        },
        tuple(reference[axis] for axis in content["axes"]) if reference else None,
        content.get("task"),
        Outliers(**outliers) if outliers else None,
        content.get("bf16_samples", 0),
    )
    if empty := next((size for size in SIZES if not grid.experiments(size)), None):
        raise ConfigError(
            f"{path}: sizes.{empty}: leave_out and this choice leave no cell; take one of them back"
        )
    return grid


def _listed(labels: Any) -> Sequence[Any]:
    return labels if isinstance(labels, list) else [labels]


def _selection(
    given: Mapping[str, Any] | None, without: str | None = None
) -> dict[str, Sequence[Any]]:
    return {axis: _listed(labels) for axis, labels in (given or {}).items() if axis != without}


def _problems(content: Any, path: Path) -> Iterator[str]:
    if not isinstance(content, Mapping):
        yield f"holds {type(content).__name__}, expected keys such as `base:` and `axes:`"
        return
    for key in content:
        if key not in KEYS:
            near = difflib.get_close_matches(str(key), KEYS, n=1)
            yield f"{key}: unknown key; did you mean {(near or ['one of ' + ', '.join(KEYS)])[0]}?"
    axes = content.get("axes")
    if not _is_axes(axes):
        yield "axes: expected {axis: {label: [overrides]}}, such as {correction: {tis: [correction=tis]}}"
        return
    base = content.get("base")
    if not isinstance(base, str) or not (path.parent / base).is_file():
        yield f"base: {base!r} is no recipe; name a file, relative to the grid"
    seeds = content.get("seeds", [])
    if not (isinstance(seeds, list) and all(type(one) is int for one in seeds)):
        yield f"seeds: {seeds!r}, expected a list of whole numbers, such as [1, 2, 3]"
    elif len({*seeds}) < len(seeds):
        yield f"seeds: {seeds!r} names one twice"
    samples = content.get("bf16_samples", 0)
    if type(samples) is not int or samples < 0:
        yield f"bf16_samples: {samples!r}, expected responses to each prompt, such as 4"
    if content.get("task") not in (None, *TASKS):
        yield f"task: {content['task']!r}: no task; they are {', '.join(TASKS)}"
    if content.get("outliers") and not content.get("task"):
        yield "outliers: they are put into a warm start's weights; name its task, such as task: counting"
    yield from _labels(axes)
    yield from _choices(content, axes)


def _is_axes(axes: Any) -> bool:
    return (
        isinstance(axes, Mapping)
        and bool(axes)
        and all(isinstance(labels, Mapping) and labels for labels in axes.values())
        and all(isinstance(words, list) for labels in axes.values() for words in labels.values())
    )


def _labels(axes: Mapping[str, Mapping[str, Sequence[Any]]]) -> Iterator[str]:
    for axis, labels in axes.items():
        for label, words in labels.items():
            if not (isinstance(label, str) and SET_NAME.fullmatch(label)):
                yield f"axes.{axis}: the label {label!r} is part of a folder's name; use letters, digits, _ and -"
            for word in words:
                key, equals, _ = str(word).partition("=")
                if not equals:
                    yield f"axes.{axis}.{label}: {word!r}: an override is written section.key=value"
                elif key in OWN_KEYS:
                    yield f"axes.{axis}.{label}: {word}: the grid sets that key itself"


def _choices(content: Mapping[str, Any], axes: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """`leave_out`, `sizes` and `reference` name axes and labels that exist."""
    sizes = content.get("sizes") or {}
    reference = content.get("reference") or {}
    if reference and set(reference) != set(axes):
        yield f"reference: {reference!r}, expected a label for each of {', '.join(axes)}"
    places = [("reference", reference)]
    places += [("leave_out", one) for one in content.get("leave_out") or ()]
    for size, one in sizes.items():
        places.append((f"sizes.{size}", one or {}))
        if size not in SIZES:
            yield f"sizes.{size}: no size; they are {', '.join(SIZES)}"
    for place, chosen in places:
        if not isinstance(chosen, Mapping):
            yield f"{place}: {chosen!r}, expected labels by axis, such as {{{next(iter(axes))}: [...]}}"
            continue
        for axis, labels in chosen.items():
            if axis == "seeds" and place.startswith("sizes."):
                continue
            if axis not in axes:
                yield f"{place}: {axis!r} is no axis"
                continue
            for label in _listed(labels):
                if label not in axes[axis]:
                    yield f"{place}: {label!r} is no label of {axis}"
