"""Facts of a model before any weight is read: sizes, learner's layout, config.json. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from megatron_rl.config import ConfigError
from megatron_rl.config.schema import LearnerSection, Precision
from megatron_rl.files import JsonObject, read_json
from megatron_rl.models.layout import Layout
from megatron_rl.models.shape import HfConfig, Lora, ModelShape

LARGEST_CONFIG = 1 << 20


@dataclass(frozen=True)
class Model:
    """A model's sizes and layout, made once from config.json and the recipe's sections."""

    shape: ModelShape
    layout: Layout
    hf_config: HfConfig
    head: Precision = Precision.bf16  # of the logits

    @classmethod
    def of(
        cls,
        hf_config: HfConfig,
        layout: Layout,
        head: Precision = Precision.bf16,
        lora: Lora | None = None,
    ) -> Model:
        return cls(replace(ModelShape.from_hf(hf_config), lora=lora), layout, dict(hf_config), head)

    @classmethod
    def read(
        cls, folder: Path | str, learner: LearnerSection, head: Precision = Precision.bf16
    ) -> Model:
        return cls.of(
            read_hf_config(folder), Layout.from_config(learner), head, Lora.of(learner.lora)
        )


def read_hf_config(path: Path | str, key: str = "model.path") -> JsonObject:
    """config.json of a model's folder, or a file that is one. `key`: what the path was given as."""
    file = Path(path)
    if file.suffix != ".json":
        file = file / "config.json"
    if not str(path) or not file.is_file():
        raise ConfigError(
            f"{key}: no config.json in {str(path)!r}; name a Hugging Face model "
            f"folder{_where_from(path)}"
        )
    try:
        return read_json(file, LARGEST_CONFIG, expected="the keys of a model's config.json")
    except ValueError as error:
        raise ConfigError(f"{key}: {error}") from None


def _where_from(path: Path | str) -> str:
    if Path(path).is_relative_to("data/toy"):
        return " (`megatron-rl toy` makes this one)"
    if Path(path).is_relative_to("runs"):
        return (
            " (a run with checkpoint.export_hf=true leaves one there, as recipes/toy_sft.yaml does)"
        )
    return ", or bring the folder there"
