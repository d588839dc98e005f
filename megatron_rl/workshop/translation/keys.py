"""Typed reading of another project's settings by name, its errors and notes; and the Translation,
weights and reject rules that several projects' settings come down to.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron_rl.config.layers import ConfigError
from megatron_rl.config.schema import (
    Aggregate,
    Anchor,
    CorrectionConfig,
    Level,
    Outside,
    Reduce,
    RejectRule,
    Stat,
    WeightConfig,
    When,
)
from megatron_rl.workshop.translation.table import table

Native = Mapping[str, Any]  # another project's settings, however they are nested
LONGEST_REASON = 2000
NO_WEIGHT = WeightConfig(level=Level.none)
UNWEIGHTED = WeightConfig(level=Level.token, high=None)  # by the bare ratio


class TranslationError(ConfigError):
    """A file that is not read, or a key without an exact counterpart; its reason is one line."""

    def __init__(self, reason: str) -> None:
        super().__init__(printable(" ".join(reason.split()))[:LONGEST_REASON])


def printable(text: str) -> str:
    """Escape characters that end a line or a comment, or that a terminal acts on."""
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)


@dataclass(frozen=True)
class Unset:
    """A value that the file alone does not hold, and the names without which it has none."""

    text: str
    names: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return self.text

    def way_out(self, key: str) -> str:
        if self.names and self.names[0].isidentifier():
            named = self.names[0]
        else:
            named = key
        missing = ", ".join(self.names) or self.text
        return f"needs {missing}, which the file does not set; add {named}=... to the command"


class Translation(NamedTuple):
    """Our config, the conditions under which it does the same, and keys of the `loss` section that
    it goes with.
    """

    config: CorrectionConfig
    notes: list[str]
    loss: dict[str, Any]
    read: frozenset[str] = frozenset()  # the keys that it is made of, as the file has them


def weigh(
    low: float | None,
    high: float | None,
    level: str = "token",
    mask: bool = False,
    mean: bool = False,
) -> WeightConfig:
    """The ratio of each token or row (of which `mean`: geometric); out of bounds nothing (`mask`)
    or the bound.
    """
    aggregate = Aggregate.geometric if mean else Aggregate.product
    outside = Outside.zero if mask else Outside.truncate
    return WeightConfig(Level(level), aggregate, outside, low, high)


def ratio_rule(low: float | None, high: float | None, reduce: Reduce | None = None) -> RejectRule:
    """Rows whose ratio, reduced this way, is out of bounds leave; without `reduce`, tokens."""
    level = Level.token if reduce is None else Level.sequence
    return RejectRule(level=level, stat=Stat.ratio, reduce=reduce, low=low, high=high)


def opsm(delta: float) -> RejectRule:
    """Off-policy sequence masking: rejects unlikely rows of negative advantage."""
    return RejectRule(stat=Stat.k1, reduce=Reduce.mean, high=delta, when=When.negative_advantage)


def is_null(value: Any) -> bool:
    return value is None or (isinstance(value, str) and value.strip().lower() in ("null", "none"))


class Keys:
    """The values of one project's settings, by name."""

    def __init__(self, framework: str, values: Native, present: bool = True) -> None:
        self.framework = framework
        self.values = dict(values)
        self.present = present  # whether the project's section is there at all
        self.replaced = False  # whether the values are those of another section
        self.notes: list[str] = []
        self.loss: dict[str, Any] = {}
        self.paths: set[str] = set()  # what was read, as the file has it

    def error(self, name: str, reason: str) -> TranslationError:
        if name not in self.values:
            value = ""
        else:
            value = f" is {reprlib.repr(self.values[name])}"
        return TranslationError(f"{self.framework}: {name}{value}: {reason}")

    def take(self, name: str, value: Any, path: str) -> None:
        """A value that the file has at this path."""
        if self.values.setdefault(name, value) != value:
            raise TranslationError(
                f"{self.framework}: {name} is given twice with different values, once at {path}"
            )
        self.paths.add(path)

    def refuse_if(self, condition: bool, name: str, reason: str, **fields: Any) -> None:
        if condition:
            raise self.error(name, self._said(reason, fields))

    def note(self, condition: str, **fields: Any) -> None:
        self.notes.append(self._said(condition, fields))

    def note_if(self, holds: bool, condition: str, **fields: Any) -> None:
        if holds:
            self.note(condition, **fields)

    def _said(self, sentence: str, fields: Mapping[str, Any]) -> str:
        """Look up a sentence of the table by its word; a sentence is returned as it is."""
        if " " in sentence:
            return sentence
        return table(self.framework).correction.says[sentence].format(**fields)

    def goes_with(self, **loss: Any) -> None:
        """Keys of the loss without which the correction is not theirs."""
        self.loss |= loss

    def note_kl(self, project: str, which: str = "rejected tokens") -> None:
        """Note that the project's reference KL and entropy still count rejected tokens."""
        self.note(f"{project}'s reference KL and entropy count {which} too")
        self.goes_with(kl_on="counted")

    def note_gspo(self, project: str, which: str = "all tokens of a row", by: str = "") -> None:
        self.note(
            f"with GSPO {project} averages the ratio over {which}, ours over the tokens that are "
            f"left{by}"
        )

    def raw(self, name: str, default: Any = None) -> Any:
        """The key's value, None if it is given as null; the default if it is missing."""
        value = self.values.get(name, default)
        if isinstance(value, Unset):
            raise TranslationError(
                f"{self.framework}: {name} is {value.text}: it {value.way_out(name)}"
            )
        return None if is_null(value) else value

    def rename(self, former: Mapping[str, str]) -> None:
        """Values under a former name, as if they had been given under today's."""
        for old, new in former.items():
            if self.given(old):
                twice = self.given(new) and self.values[new] != self.values[old]
                self.refuse_if(twice, old, f"given as {new} too, with a different value")
                self.values[new] = self.values[old]

    def replace(self, other: Keys, names: Collection[str]) -> None:
        """The values of another section for these names, absent ones included."""
        kept = {name: value for name, value in self.values.items() if name not in names}
        self.values = kept | {name: value for name, value in other.values.items() if name in names}
        self.notes += other.notes
        self.paths |= other.paths
        self.present = self.replaced = True

    def given(self, name: str) -> bool:
        return self.raw(name) is not None

    def taken_as_true(self, needed: bool, name: str, otherwise: str) -> None:
        """Note what a switch that is needed and not given is read as."""
        if needed and not self.given(name):
            self.note(f"{name} is not given and taken as true; {otherwise}")

    def flag(self, name: str, default: bool) -> bool:
        value = self.raw(name)
        if value is None:
            return default
        self.refuse_if(str(value).lower() not in ("true", "false"), name, "expected true or false")
        return str(value).lower() == "true"

    def choice(self, name: str, default: str | None, *choices: str) -> str | None:
        value = self.raw(name, default)
        self.refuse_if(
            value is not None and value not in choices,
            name,
            f"expected one of {', '.join(choices)}",
        )
        return value

    def text(self, name: str) -> str | None:
        value = self.raw(name)
        return None if value is None else str(value)

    def number(self, name: str, default: float | None = None) -> float | None:
        value = self.raw(name, default)
        if value is None:
            return None
        return self.as_number(name, value)

    def needed(self, name: str, project: str, default: float) -> float:
        value = self.number(name, default)
        if value is None:
            raise self.error(name, f"{project} needs a number")
        return value

    def positive(self, name: str, default: float | None = None) -> float | None:
        value = self.number(name, default)
        self.refuse_if(value is not None and value <= 0, name, "expected a number above 0")
        return value

    def lower(self, name: str, default: float | None = None) -> float | None:
        """A lower bound on a ratio: 0 bounds nothing."""
        value = self.number(name, default)
        self.refuse_if(value is not None and value < 0, name, "ratios are never negative")
        return value or None

    def as_number(self, name: str, value: Any) -> float:
        try:
            # underscores separate digits in Python and YAML, and bounds in verl: never guess which
            if isinstance(value, bool) or "_" in str(value):
                number = math.nan
            else:
                number = float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        self.refuse_if(not math.isfinite(number), name, "expected a number")
        return number

    def bypass(self, *rules: RejectRule) -> Translation:
        """The loss's ratio is to the sampler, which is the whole correction but for these rules."""
        return self.translation(NO_WEIGHT, list(rules), anchor=Anchor.sampler)

    def translation(
        self, weight: WeightConfig, rules: list[RejectRule], renormalize: bool = False, **more: Any
    ) -> Translation:
        """The correction in our keys: no project recomputes group baselines after a rejection."""
        config = CorrectionConfig(
            weight=weight, reject=rules, rebaseline=False, renormalize=renormalize, **more
        )
        return Translation(config, self.notes, self.loss, frozenset(self.paths))
