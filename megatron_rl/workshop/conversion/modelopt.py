"""Formats of nvidia-modelopt: calibrated with the model's own forward pass, exported in its unified form.

The model is held in memory whole, in BF16, and run by transformers. INT8 is not among them: modelopt's export has none.
"""

from __future__ import annotations

import copy
import shutil
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_rl.models.model import read_hf_config
from megatron_rl.models.weight_files import companions
from megatron_rl.workshop.conversion.calibration import Coverage, about
from megatron_rl.workshop.conversion.comparison import compare
from megatron_rl.workshop.conversion.outcome import Seen, write_outcome
from megatron_rl.workshop.conversion.prompts import Rows
from megatron_rl.workshop.conversion.sources import Source
from megatron_rl.workshop.conversion.work import begun

FORMATS = ("modelopt_fp8", "modelopt_fp8_kv", "modelopt_nvfp4")


def modelopt_folder(
    source: Source,
    target: Path,
    format: str,
    rows: Rows,
    calibrated_on: str,
    ignore: Sequence[str],
    note: Callable[[str], None],
) -> None:
    """ValueError where a tensor of the result is further from the plain one than the format's rounding."""
    job = {**source.job, "format": format, "rows": [list(row) for row in rows], "ignore": list(ignore)}
    with begun(target, [source.path], {"command": "quantize", **job}, note, {}) as work:
        coverage = _exported(source, work.path, format, rows, ignore)
        note(f"calibrated on {calibrated_on}: {coverage}")
        for name in companions(source.folder):
            if not (work.path / name).exists():
                shutil.copyfile(source.folder / name, work.path / name)
        made = Source(work.path, work.path, read_hf_config(work.path))
        seen: tuple[dict[str, str], dict[str, str]] = {}, {}
        errors = {}
        for one in compare(source, made, seen=seen):
            if not one.ok:
                raise ValueError(f"modelopt's export of {one.name} is not the weight that went in: {one.said}")
            if one.error:
                errors[one.name] = one.error
        first = next(iter(seen[1]))
        made_of = {name: [seen[0] if name == first else {}] for name in seen[1]}
        calibration = about(coverage, calibrated_on)
        found = Seen(seen[1], made_of, errors)
        write_outcome(work.path, "quantize", [source.path], found, format=format, calibration=calibration)
        work.publish()


def _exported(source: Source, folder: Path, format: str, rows: Rows, ignore: Sequence[str]) -> Coverage:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import modelopt.torch.quantization as mtq
        from modelopt.torch.export import export_hf_checkpoint
        from modelopt.torch.quantization.nn import TensorQuantizer
        from modelopt.torch.quantization.utils import update_quant_cfg_with_kv_cache_quant
        from transformers import AutoModelForCausalLM

        wanted = copy.deepcopy(mtq.NVFP4_DEFAULT_CFG if format == "modelopt_nvfp4" else mtq.FP8_DEFAULT_CFG)
        if format == "modelopt_fp8_kv":
            wanted = update_quant_cfg_with_kv_cache_quant(wanted, mtq.FP8_KV_CFG["quant_cfg"])
        wanted["quant_cfg"] += [{"quantizer_name": f"*{name}.*", "enable": False} for name in ignore]
        model: Any = AutoModelForCausalLM.from_pretrained(
            source.path, dtype=torch.bfloat16, local_files_only=True, use_safetensors=True
        )

        def forward(model: Any) -> None:
            with torch.no_grad():
                for row in rows:
                    model(torch.tensor([row]))

        mtq.quantize(model, wanted, forward)
        export_hf_checkpoint(model, export_dir=folder)
    inputs = [
        module
        for name, module in model.named_modules()
        if isinstance(module, TensorQuantizer) and name.endswith("input_quantizer") and module.is_enabled
    ]
    seen = sum(module.amax is not None for module in inputs)
    return Coverage(len(rows), sum(map(len, rows)), seen / max(len(inputs), 1))
