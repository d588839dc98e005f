"""Typed reading of another project's settings by name, its errors and notes; and the weights and
reject rules that several projects' settings come down to.
"""

import math
import reprlib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from megatron_rl.apps.translation.table import table
from megatron_rl.config.layers import ConfigError
from megatron_rl.config.schema import (
    Aggregate,
    Anchor,
    Center,
    CorrectionConfig,
    Level,
    Outside,
    Reduce,
    RejectRule,
    Stat,
    WeightConfig,
    When,
)

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

    def hint(self, key: str) -> str:
        missing = ", ".join(self.names) or self.text
        if self.names and self.names[0].isidentifier():
            key = self.names[0]
        return f"needs {missing}, which the file does not set; add {key}=... to the command"


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

    def __init__(self, framework: str, flat: Native, present: bool = True) -> None:
        self.framework = framework
        self.flat = dict(flat)  # all keys of the file
        self.apart: dict[str, Any] = {}  # those of them that the project's module reads itself
        self.values: dict[str, Any] = {}
        self.present = present  # whether the project's section is there at all
        self.replaced = False  # whether the values are those of another section
        self.notes: list[str] = []
        self.loss: dict[str, Any] = {}
        self.paths: set[str] = set()  # what was read, as the file has it

    def error(self, name: str, reason: str) -> TranslationError:
        value = ""
        if name in self.values:
            value = f" is {reprlib.repr(self.values[name])}"
        return TranslationError(f"{self.framework}: {name}{value}: {reason}")

    def take(self, name: str, value: Any, path: str) -> None:
        """A value that the file has at this path."""
        if self.values.setdefault(name, value) != value:
            raise TranslationError(
                f"{self.framework}: {name} is given twice with different values, once at {path}"
            )
        self.paths.add(path)

    def refuse_if(self, condition: object, name: str, reason: str, **fields: Any) -> None:
        if condition:
            raise self.error(name, self._said(reason, fields))

    def note(self, condition: str, **fields: Any) -> None:
        self.notes.append(self._said(condition, fields))

    def note_if(self, holds: object, condition: str, **fields: Any) -> None:
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
            f"with GSPO {project} averages the ratio over {which}, ours over the tokens that are left{by}"
        )

    def raw(self, name: str, default: Any = None) -> Any:
        """The key's value, None if it is given as null; the default if it is missing."""
        value = self.values.get(name, default)
        if isinstance(value, Unset):
            raise TranslationError(
                f"{self.framework}: {name} is {value.text}: it {value.hint(name)}"
            )
        return None if is_null(value) else value

    def rename(self, former: Mapping[str, str]) -> None:
        """Values under a former name, as if they had been given under today's."""
        for old, new in former.items():
            if self.given(old):
                twice = self.given(new) and self.values[new] != self.values[old]
                self.refuse_if(twice, old, f"given as {new} too, with a different value")
                self.values[new] = self.values[old]

    def replace(self, other: "Keys", names: Iterable[str]) -> None:
        """The values of another section for these names, absent ones included."""
        for name in names:
            self.values.pop(name, None)
            if name in other.values:
                self.values[name] = other.values[name]
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
        word = str(value).lower()
        self.refuse_if(word not in ("true", "false"), name, "expected true or false")
        return word == "true"

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
        number = math.nan
        # underscores separate digits in Python and YAML, and bounds in verl: never guess which
        if not isinstance(value, bool) and "_" not in str(value):
            with suppress(TypeError, ValueError, OverflowError):
                number = float(value)
        self.refuse_if(not math.isfinite(number), name, "expected a number")
        return number

    def bypass(self, *rules: RejectRule) -> CorrectionConfig:
        """The loss's ratio is to the sampler, which is the whole correction but for these rules."""
        return self.correction(NO_WEIGHT, rules, anchor=Anchor.sampler)

    def centered(
        self, config: CorrectionConfig, switch: str = "score_centering"
    ) -> CorrectionConfig:
        """The correction, with score centering if the project's switch is on."""
        if not self.flag(switch, False):
            return config
        self.note("of the top tokens, ours keeps as many as hold rollout.top_logprobs.mass")
        if config.anchor == Anchor.sampler and config.weight.level != Level.none:
            self.note("ours weighs by the policy before the updates: the same with one per batch")
            config = replace(config, anchor=Anchor.prox)
        return replace(config, center=Center.top_logprobs)

    def correction(
        self,
        weight: WeightConfig,
        rules: Iterable[RejectRule] = (),
        renormalize: bool = False,
        **more: Any,
    ) -> CorrectionConfig:
        """The correction in our keys: no project recomputes group baselines after a rejection."""
        return CorrectionConfig(
            weight=weight, reject=list(rules), rebaseline=False, renormalize=renormalize, **more
        )
