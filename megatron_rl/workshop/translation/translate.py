"""Other projects' correction settings as ours.

`translate` is exact or an error: where the result is the same only under a condition it says so in a
note, where it cannot be the same it names the key and the reason. Group baselines are never recomputed
after a rejection in those projects, so every translation has `rebaseline: false`.
"""

from __future__ import annotations

import difflib
import sys
import textwrap
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import yaml

from megatron_rl.config.correction_rules import check_correction
from megatron_rl.config.load import PRESET_SECTIONS
from megatron_rl.config.plain_yaml import read_yaml, write_yaml
from megatron_rl.config.schema import Anchor, Config, CorrectionConfig, Level, NonFinite, Stat
from megatron_rl.config.shape import misfits
from megatron_rl.workshop.translation.areal import areal
from megatron_rl.workshop.translation.fireworks import fireworks
from megatron_rl.workshop.translation.keys import Translation, TranslationError
from megatron_rl.workshop.translation.nemo_rl import nemo_rl
from megatron_rl.workshop.translation.openrlhf import openrlhf
from megatron_rl.workshop.translation.prime_rl import prime_rl
from megatron_rl.workshop.translation.settings import LEFT_OUT
from megatron_rl.workshop.translation.skyrl import skyrl
from megatron_rl.workshop.translation.slime import slime
from megatron_rl.workshop.translation.trl import trl
from megatron_rl.workshop.translation.verl import verl

__all__ = ["FRAMEWORKS", "TranslatedConfig", "TranslationError", "translate", "translate_file", "yaml_text"]

FRAMEWORKS: dict[str, Callable[[Mapping[str, Any]], Translation]] = {
    one.__name__: one for one in (verl, skyrl, trl, nemo_rl, areal, slime, openrlhf, fireworks, prime_rl)
}


@dataclass(frozen=True, eq=False)
class TranslatedConfig(CorrectionConfig):
    """A correction config with the conditions under which it does the same. Unpacks into (config, notes)."""

    notes: list[str] = field(default_factory=list)

    @property
    def config(self) -> CorrectionConfig:
        return CorrectionConfig(**{each.name: getattr(self, each.name) for each in fields(CorrectionConfig)})

    def __iter__(self) -> Iterator[Any]:
        yield self.config
        yield self.notes

    def __eq__(self, other: object) -> bool:
        """Equality as configs: what is noted about one does not make it another."""
        return self.config == (other.config if isinstance(other, TranslatedConfig) else other)


def translate(framework: str, mapping: Mapping[str, Any]) -> TranslatedConfig:
    """The native keys of a project as our config: the section or a whole file; nested, dotted or as flags."""
    name = framework.lower().replace("-", "_")
    if name not in FRAMEWORKS:
        near = difflib.get_close_matches(name, FRAMEWORKS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise TranslationError(f"framework is {framework!r}: known are {', '.join(FRAMEWORKS)}{hint}")
    if not isinstance(mapping, Mapping):
        raise TranslationError(f"{framework}: expected keys and values, got {type(mapping).__name__}")
    found = FRAMEWORKS[name](mapping)
    config = found.config
    rules = [rule for rule in config.reject if rule.stat != Stat.staleness]
    if config.anchor == Anchor.prox and config.weight.level == Level.none and not rules:
        # who corrects nothing trains tokens without a sampler logprob like all others
        config = replace(config, non_finite=NonFinite.one)
    problems = check_correction(config)
    if problems:
        raise TranslationError(f"{framework}: these settings make no valid correction: " + "; ".join(problems))
    conditions_first = sorted(found.notes, key=lambda note: note.startswith(LEFT_OUT))
    return TranslatedConfig(**vars(config), notes=conditions_first)


def translate_file(framework: str, path: str | Path) -> str:
    """The YAML text of a file of native keys, YAML or TOML (`-`: YAML on standard input), notes as comments."""
    try:
        text = sys.stdin.read() if str(path) == "-" else Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise TranslationError(f"{path}: not readable as text: {error}") from None
    form, read = ("TOML", tomllib.loads) if Path(path).suffix == ".toml" else ("YAML", read_yaml)
    try:
        mapping = read(text)
    except (yaml.YAMLError, ValueError) as error:
        raise TranslationError(f"{path}: not valid {form} ({error})") from None
    found = translate(framework, {} if mapping is None else mapping)
    if mapping and _is_ours(mapping) and found == translate(framework, {}):
        raise TranslationError(
            f"{path}: this is a recipe of ours, without any setting of {framework}; name a file of {framework}'s"
        )
    lines = [f"{framework}: {Path(path).name}", *found.notes]
    return "".join(f"{_comment(line)}\n" for line in lines) + yaml_text(found.config)


def _is_ours(mapping: Mapping[str, Any]) -> bool:
    """Whether it fits our own schema; presets and bases are names there."""
    known = {key: value for key, value in mapping.items() if key not in ("base", *PRESET_SECTIONS)}
    return not any(misfits(known, Config))


def _comment(text: str) -> str:
    lines = textwrap.wrap(text, width=98, break_long_words=False, break_on_hyphens=False)
    return "\n#   ".join(["# " + lines[0], *lines[1:]])


def yaml_text(config: CorrectionConfig) -> str:
    """The whole config under `correction:`, so that nothing is inherited from a recipe's base."""
    whole = asdict(config)
    whole["reject"] = [{name: value for name, value in rule.items() if value is not None} for rule in whole["reject"]]
    return write_yaml({"correction": whole})
