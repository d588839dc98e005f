"""Calibration of `tools/convert.py quantize` on texts: maxima of activations by a learner, for
smoothing; FP8 and NVFP4 by modelopt. `verify` takes its texts from here, and the models that score
them.

modelopt holds the model in memory whole, in BF16, runs it with transformers, and writes its unified
form, without INT8.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megatron_rl.batch import Batch, collate
from megatron_rl.config import ConfigError
from megatron_rl.config.load import from_base
from megatron_rl.config.schema import Config, QuantizationSection
from megatron_rl.data.prompts import FolderTokenizer, load_dataset
from megatron_rl.models.layout import Layout
from megatron_rl.models.model import Model
from megatron_rl.types import Prompt, Rollout, Scored, written
from megatron_rl.workshop.conversion.sources import Source, note

if TYPE_CHECKING:
    from megatron_rl.learner.learner import Learner

Rows = Sequence[tuple[int, ...]]
SAMPLES = 128
LONGEST = 512  # tokens; of a longer text the first ones
MODELOPT = ("modelopt_fp8", "modelopt_fp8_kv", "modelopt_nvfp4")


def token_rows(given: str, folder: Path) -> list[tuple[int, ...]]:
    """Token ids of texts, with the tokenizer of `folder`.

    `given`: a file of texts, one a line (.txt), a data set as `data.train` takes it, or a preset of
    conf/data.
    """
    tokenizer = FolderTokenizer(folder)
    path = Path(given)
    if path.suffix == ".txt" and path.is_file():
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        rows = [tuple(ids) for ids in tokenizer.encode_texts(lines[:SAMPLES], LONGEST)]
    else:
        data = from_base({}, [f"data.train={path}"] if path.exists() else [f"data={given}"]).data
        rows = [
            prompt.token_ids
            for prompt in load_dataset("train", data, tokenizer, LONGEST).prompts[:SAMPLES]
        ]
    rows = [row[:LONGEST] for row in rows if len(row) > 1]
    if not rows:
        raise ConfigError(f"{given} holds no text of two tokens or more")
    return rows


def batch_of(rows: Rows) -> Batch:
    """Every token but the first is asked for."""
    parts = [(row[1:], [0.0] * (len(row) - 1), written(len(row) - 1)) for row in rows]
    prompts = [Prompt(number, row[:1], "", {}) for number, row in enumerate(rows)]
    rollouts = [
        Rollout(one, one.id, 0, *part, "stop", 0) for one, part in zip(prompts, parts, strict=True)
    ]
    return collate([Scored(rollout, reward=0.0) for rollout in rollouts])


def coverage(given: str, rows: Rows, seen: float) -> str:
    counts = f"{len(rows)} samples, {sum(map(len, rows))} tokens"
    said = f"{given}: {counts}, {seen:.1%} of the places to measure were reached"
    note(f"calibrated on {said}")
    return said


@contextmanager
def learner_at(
    source: Source, quantization: QuantizationSection | None = None
) -> Iterator[Learner]:
    """The model in this process alone, with the weights of `source`."""
    # megatron: seconds that other conversions need not wait for
    from megatron_rl.learner.learner import (
        Learner,
    )
    from megatron_rl.learner.policy import Sections

    config = Config(quantization=quantization or QuantizationSection())
    learner = Learner(Model.of(source.hf_config, Layout()), Sections.of(config))
    try:
        learner.load(source.weights.open())
        yield learner
    finally:
        learner.close()


def activation_amax(source: Source, given: str) -> tuple[torch.Tensor, str]:
    """[layer, norm, channel]: the largest magnitude of each norm's output; and how much was looked
    at.
    """
    rows = token_rows(given, source.folder)
    # any: it is what makes a learner look
    with learner_at(source, QuantizationSection(smoothing=0.5)) as learner:
        learner.logprobs(batch_of(rows))
        amax_LNH = learner.take_activation_amax().cpu()
    return amax_LNH, coverage(given, rows, float((amax_LNH > 0).float().mean()))


def transformers_model(source: Source) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        source.path, dtype=torch.bfloat16, local_files_only=True, use_safetensors=True
    )


def export_by_modelopt(
    source: Source, folder: Path, format: str, rows: Rows, ignore: Sequence[str]
) -> float:
    """The share of modelopt's input quantizers that saw data."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import modelopt.torch.quantization as mtq
        from modelopt.torch.export import export_hf_checkpoint
        from modelopt.torch.quantization.nn import TensorQuantizer
        from modelopt.torch.quantization.utils import update_quant_cfg_with_kv_cache_quant

        wanted = copy.deepcopy(
            mtq.NVFP4_DEFAULT_CFG if format == "modelopt_nvfp4" else mtq.FP8_DEFAULT_CFG
        )
        if format == "modelopt_fp8_kv":
            wanted = update_quant_cfg_with_kv_cache_quant(wanted, mtq.FP8_KV_CFG["quant_cfg"])
        wanted["quant_cfg"] += [
            {"quantizer_name": f"*{name}.*", "enable": False} for name in ignore
        ]

        def forward(model: Any) -> None:
            with torch.no_grad():
                for row in rows:
                    model(torch.tensor([row]))

        model = transformers_model(source)
        mtq.quantize(model, wanted, forward)
        export_hf_checkpoint(model, export_dir=folder)
    inputs = [
        module
        for name, module in model.named_modules()
        if isinstance(module, TensorQuantizer)
        and name.endswith("input_quantizer")
        and module.is_enabled
    ]
    return sum(module.amax is not None for module in inputs) / max(len(inputs), 1)
