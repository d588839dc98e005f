"""FP8 and NVFP4 folders by nvidia-modelopt, for `tools/convert.py quantize`.

modelopt holds the model in memory whole, in BF16, runs it with transformers on texts, and writes
its unified form, without INT8.
"""

import copy
import shutil
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megatron_rl.apps.conversion.sources import Source, note, of_folder
from megatron_rl.apps.conversion.verification import compare
from megatron_rl.apps.conversion.work import begun
from megatron_rl.config import ConfigError
from megatron_rl.config.load import from_base
from megatron_rl.data.hub_sets import pinned
from megatron_rl.data.prompts import FolderTokenizer, load_dataset
from megatron_rl.models.model import read_hf_config
from megatron_rl.models.weight_files import companions

MODELOPT = ("modelopt_fp8", "modelopt_fp8_kv", "modelopt_nvfp4")
SAMPLES = 128
LONGEST = 512  # tokens; of a longer text the first ones
Rows = Sequence[tuple[int, ...]]


def quantize_by_modelopt(
    source: Source, target: Path, format: str, calibrate: str, ignore: Sequence[str]
) -> None:
    """Quantize by modelopt; ValueError if a tensor is off by more than the format's rounding."""
    if not source.is_folder or source.quantization is not None:
        raise ConfigError(f"{source.path}: modelopt needs a plain Hugging Face folder")
    if patterns := [entry for entry in ignore if entry.startswith("re:")]:
        raise ConfigError(f"--ignore {patterns[0]}: modelopt takes names of layers")
    rows = token_rows(calibrate, source.folder)
    with begun(target, "quantize", [source]) as work:
        reached = _export(source, work.path, format, rows, ignore)
        tokens = sum(map(len, rows))
        calibration = f"{calibrate}: {len(rows)} samples, {tokens} tokens, {reached:.1%} reached"
        note(f"calibrated on {calibration}")
        for name in companions(source.folder):
            if not (work.path / name).exists():
                shutil.copyfile(source.folder / name, work.path / name)
        for one in compare(source, Source(work.path, work.path, read_hf_config(work.path))):
            if not one.ok:
                raise ValueError(f"modelopt's {one.name} is not the weight given: {one.reason}")
        work.publish(of_folder(work.path), format=format, calibration=calibration)


def token_rows(given: str, folder: Path) -> list[tuple[int, ...]]:
    """Token ids of texts, with the tokenizer of `folder`.

    `given`: a file of one text per line (.txt), a data set (as in `data.train`), or a preset.
    """
    tokenizer = FolderTokenizer(folder)
    path = Path(given)
    if path.suffix == ".txt" and path.is_file():
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        rows = [tuple(ids) for ids in tokenizer.encode_texts(lines[:SAMPLES], LONGEST)]
    else:
        config = from_base({}, [f"data.train={path}" if path.exists() else f"data={given}"])
        data = pinned(replace(config, data=replace(config.data, eval=None))).data
        prompts = load_dataset("train", data, tokenizer, LONGEST).prompts[:SAMPLES]
        rows = [prompt.token_ids for prompt in prompts]
    rows = [row for row in rows if len(row) > 1]
    if not rows:
        raise ConfigError(f"{given} holds no text of two tokens or more")
    return rows


def _export(source: Source, folder: Path, format: str, rows: Rows, ignore: Sequence[str]) -> float:
    """The share of modelopt's input quantizers that saw data."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import modelopt.torch.quantization as mtq
        from modelopt.torch.export import export_hf_checkpoint
        from modelopt.torch.quantization.nn import TensorQuantizer
        from modelopt.torch.quantization.utils import update_quant_cfg_with_kv_cache_quant
        from transformers import AutoModelForCausalLM

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

        model: Any = AutoModelForCausalLM.from_pretrained(
            source.path, dtype=torch.bfloat16, local_files_only=True, use_safetensors=True
        )
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
