"""`megatron-rl translate --correction`: another project's correction settings as ours, in YAML.

`translate`, which recipe.py calls too, is exact or an error: where the result is the same only
under a condition, a note states it; where it cannot be the same, the error names key and reason.
Those projects never recompute group baselines after a rejection: `rebaseline` is always false.
"""

import textwrap
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from megatron_rl.apps.translation import (
    areal,
    fireworks,
    nemo_rl,
    openrlhf,
    prime_rl,
    skyrl,
    slime,
    trl,
    verl,
)
from megatron_rl.apps.translation.keys import (
    Keys,
    Native,
    TranslationError,
    printable,
)
from megatron_rl.apps.translation.reading import Reading
from megatron_rl.apps.translation.settings import LEFT_OUT, flatten, settings
from megatron_rl.apps.translation.sources import read_native
from megatron_rl.apps.translation.table import table
from megatron_rl.config.bounds import as_written, did_you_mean
from megatron_rl.config.correction_rules import check_correction
from megatron_rl.config.plain_yaml import read_yaml, write_yaml
from megatron_rl.config.schema import Anchor, CorrectionConfig, Level, NonFinite, Stat

FRAMEWORKS: dict[str, Callable[[Keys], CorrectionConfig]] = {
    "verl": verl.verl,
    "skyrl": skyrl.skyrl,
    "trl": trl.trl,
    "nemo_rl": nemo_rl.nemo_rl,
    "areal": areal.areal,
    "slime": slime.slime,
    "openrlhf": openrlhf.openrlhf,
    "fireworks": fireworks.fireworks,
    "prime_rl": prime_rl.prime_rl,
}


class Translation(NamedTuple):
    """Our config, the conditions under which it does the same, and keys of the `loss` section that
    it goes with.
    """

    config: CorrectionConfig
    notes: list[str]
    loss: dict[str, Any]
    read: set[str]  # the keys that it is made of, as the file has them


def translate(framework: str, mapping: Native) -> Translation:
    """Translate native keys (a section or a file; nested, dotted or flags) to our config."""
    name = known_project(framework)
    keys = settings(name, mapping)
    config = FRAMEWORKS[name](keys)
    if keys.loss:
        loss = (f"loss.{key}: {as_written(value)}" for key, value in keys.loss.items())
        keys.note(f"goes with {', '.join(loss)}")
    rules = [rule for rule in config.reject if rule.stat != Stat.staleness]
    if config.anchor == Anchor.prox and config.weight.level == Level.none and not rules:
        # who corrects nothing trains tokens without a sampler logprob like all others
        config = replace(config, non_finite=NonFinite.one)
    if problems := check_correction(config):
        raise TranslationError(
            f"{framework}: these settings make no valid correction: " + "; ".join(problems)
        )
    conditions_first = sorted(keys.notes, key=lambda note: note.startswith(LEFT_OUT))
    return Translation(config, conditions_first, keys.loss, keys.paths)


def known_project(framework: str) -> str:
    name = framework.lower().replace("-", "_")
    if name not in FRAMEWORKS:
        known = ", ".join(FRAMEWORKS)
        raise TranslationError(
            f"framework is {framework!r}: {did_you_mean(name, FRAMEWORKS)} known are {known}"
        )
    return name


def translate_file(framework: str, path: Path, given: Mapping[str, str] | None = None) -> str:
    """YAML of a file's correction (`-`: YAML on standard input), with notes as comments."""
    config, notes, *_ = translate(framework, native(framework, path, given or {}))
    return document([f"{framework}: {path.name}", *notes], correction_section(config))


def native(framework: str, path: Path, given: Mapping[str, str]) -> dict[str, Any]:
    """The keys of a file, dotted, with those of the command line over them."""
    rules = table(known_project(framework))
    mapping, variables = read_native(path, rules, given)
    flat = flatten(mapping)
    known = {*flat, *rules.by_name, *rules.correction.keys}
    reading = Reading()
    written = {name: reading.plain(reading.scalar(text)) for name, text in given.items()}
    for name, value in flatten(written).items():
        if name in known or rules.reason(name):
            flat[name] = value
        elif name not in variables:
            hint = did_you_mean(name, {*known, *variables}) or "leave it out"
            raise TranslationError(
                f"{name}: no variable that {path} reads, and no key of {framework}; {hint}"
            )
    return flat


def document(lines: Sequence[str], mapping: Mapping[str, Any]) -> str:
    """YAML with these lines as comments; checked to hold the mapping and nothing else."""
    section = write_yaml(mapping)
    text = "".join(f"{comment(line)}\n" for line in lines) + section
    with suppress(ValueError, yaml.YAMLError):
        if write_yaml(read_yaml(text)) == section:
            return text
    raise TranslationError(
        "the translated recipe is not read back as it is: its keys are too many, too long or too deep"
    )


def comment(text: str) -> str:
    return textwrap.fill(
        printable(text),
        width=100,
        initial_indent="# ",
        subsequent_indent="#   ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def correction_section(config: CorrectionConfig) -> dict[str, Any]:
    """The whole config under `correction:`, so that nothing is inherited from a recipe's base."""
    whole = asdict(config)
    whole["reject"] = [
        {name: value for name, value in rule.items() if value is not None}
        for rule in whole["reject"]
    ]
    return {"correction": whole}
