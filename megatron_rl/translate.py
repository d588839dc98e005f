"""Other projects' correction settings as ours.

`translate` is exact or an error: where the result is the same only under a condition it says so in a
note, where it cannot be the same it names the key and the reason. Group baselines are never recomputed
after a rejection in those projects, so every translation has `rebaseline: false`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from megatron_rl.correction.checks import check_correction
from megatron_rl.plain_yaml import read_yaml, write_yaml
from megatron_rl.schema import CorrectionConfig
from megatron_rl.translation.areal import areal
from megatron_rl.translation.flat import fireworks, nemo_rl, openrlhf, slime, trl
from megatron_rl.translation.keys import Translation, TranslationError, nested
from megatron_rl.translation.verl_skyrl import skyrl, verl

__all__ = ["FRAMEWORKS", "Translation", "TranslationError", "translate", "translate_file", "yaml_text"]

FRAMEWORKS: dict[str, Callable[[Mapping[str, Any]], Translation]] = {
    "verl": verl,
    "skyrl": skyrl,
    "trl": trl,
    "nemo_rl": nemo_rl,
    "areal": areal,
    "slime": slime,
    "openrlhf": openrlhf,
    "fireworks": fireworks,
}


def translate(framework: str, mapping: Mapping[str, Any]) -> Translation:
    """(config, notes) for the native keys of a project, nested, dotted or as flags."""
    name = framework.lower().replace("-", "_")
    if name not in FRAMEWORKS:
        raise TranslationError(f"framework is {framework!r}: known are {', '.join(FRAMEWORKS)}")
    if not isinstance(mapping, Mapping):
        raise TranslationError(f"{framework}: expected keys and values, got {type(mapping).__name__}")
    found = FRAMEWORKS[name](nested(mapping))
    problems = check_correction(found.config)
    if problems:
        raise TranslationError(f"{framework}: these settings make no valid correction: " + "; ".join(problems))
    return found


def translate_file(framework: str, path: str | Path) -> str:
    """The YAML text of a file of native keys, notes as comments."""
    text = Path(path).read_text()
    try:
        mapping = read_yaml(text)
    except yaml.YAMLError as error:
        raise TranslationError(f"{path}: not valid YAML ({error})") from None
    if mapping is None:
        mapping = {}
    found = translate(framework, mapping)
    notes = "".join(f"# {note}\n" for note in found.notes)
    return f"# {framework}: {Path(path).name}\n{notes}{yaml_text(found.config)}"


def yaml_text(config: CorrectionConfig) -> str:
    """The whole config under `correction:`, so that nothing is inherited from a recipe's base."""
    whole = asdict(config)
    whole["reject"] = [{name: value for name, value in rule.items() if value is not None} for rule in whole["reject"]]
    return write_yaml({"correction": whole})
