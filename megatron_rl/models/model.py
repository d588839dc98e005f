"""What is known of a model before any weight is read: sizes, the learner's layout, config.json itself. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.config import ConfigError
from megatron_rl.config.schema import LearnerSection
from megatron_rl.models.layout import Layout
from megatron_rl.models.shape import ModelShape


@dataclass(frozen=True)
class Model:
    """Made once, from config.json and the learner's section, and handed down."""

    shape: ModelShape
    layout: Layout
    hf_config: Mapping[str, Any]

    @classmethod
    def of(cls, hf_config: Mapping[str, Any], layout: Layout) -> Model:
        return cls(ModelShape.from_hf(hf_config), layout, dict(hf_config))

    @classmethod
    def read(cls, folder: Path | str, learner: LearnerSection) -> Model:
        return cls.of(read_hf_config(folder), Layout.from_config(learner))


def read_hf_config(path: Path | str, key: str = "model.path") -> dict[str, Any]:
    """config.json of a model's folder, or a file that is one. `key`: what the path was given as."""
    file = Path(path) if Path(path).suffix == ".json" else Path(path) / "config.json"
    if not str(path) or not file.is_file():
        raise ConfigError(
            f"{key}: no config.json in {str(path)!r}; name a Hugging Face model folder "
            "(`megatron-rl toy` makes a small one)"
        )
    try:
        found = json.loads(file.read_text())
    except ValueError as error:
        raise ConfigError(f"{key}: {file} is not valid JSON ({error})") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{key}: {file} holds a {type(found).__name__}, expected the keys of a model's config.json")
    return found
