"""Live engines of mixtures of experts, several in one process: run as a script, leaves what it found as JSON.

One process, because importing vLLM takes longer than everything that happens here.
"""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from simulated import hf_config, random_hf
from tiny_engine import PROMPTS, make_config
from vllm.model_executor.layers.fused_moe import RoutedExperts

from megatron_rl.sampler import model_folder
from megatron_rl.sampler.child import Engine
from megatron_rl.schema import Config, Format
from megatron_rl.weight_sync import file_transport as transport
from megatron_rl.weight_sync import receiver, reload
from megatron_rl.weight_sync.manifest import WeightSyncError
from megatron_rl.weight_sync.model_shape import ModelShape
from megatron_rl.weight_sync.quantize import is_quantized, quantize

EXPERTS = r"re:.*\.experts\..*"  # hosts have no kernel for quantized experts
SIZES: dict[str, Any] = {
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "max_position_embeddings": 64, "num_experts_per_tok": 2, "rms_norm_eps": 1e-6, "hidden_act": "silu",
    "rope_theta": 10000.0, "dtype": "bfloat16",
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_moe": hf_config("qwen3_moe", architectures=["Qwen3MoeForCausalLM"], norm_topk_prob=True, **SIZES),
    "mixtral": hf_config("mixtral", architectures=["MixtralForCausalLM"], sliding_window=None, **SIZES)
    | {"num_local_experts": 4},
}


class Case:
    """One model and format: its weights by seed, its engine, and the versions that reach it."""

    def __init__(self, family: str, format: Format, folder: Path) -> None:
        self.hf, self.folder, self.version = MODELS[family], folder, -1
        config = make_config(format)
        ignore = [*config.quantization.ignore, EXPERTS]
        self.config: Config = replace(config, quantization=replace(config.quantization, ignore=ignore))
        (folder / "hf").mkdir(parents=True)
        (folder / "hf" / "config.json").write_text(json.dumps(self.hf))

    def tensors(self, seed: int) -> dict[str, torch.Tensor]:
        quantization, tensors = self.config.quantization, {}
        for name, drawn in random_hf(ModelShape.from_hf(self.hf), torch.float32, seed).items():
            tensor = (1 + 0.02 * drawn if drawn.ndim == 1 else 0.1 * drawn).bfloat16()
            if is_quantized(name, quantization.format, quantization.ignore):
                for suffix, part in quantize(tensor, quantization.format).items():
                    tensors[name.removesuffix("weight") + suffix] = part
            else:
                tensors[name] = tensor
        return tensors

    def start(self, name: str, **arguments: Any) -> Engine:
        folder = model_folder.write_engine_folder(self.folder / "hf", self.folder / name, self.config)
        if arguments:
            save_file(self.tensors(1), folder / "model.safetensors", {"format": "pt"})
        return Engine(model_folder.engine_arguments(self.config, folder) | arguments)

    def update(self, engine: Engine, tensors: dict[str, torch.Tensor]) -> str:
        """The next version into the engine; what it said against it."""
        self.version += 1
        transport.write_version(self.folder, self.version, tensors.items(), format=self.config.quantization.format)
        try:
            engine.start_weight_update()
            engine.update_weights(transport.update_info(self.folder, self.version, 1))
            engine.finish_weight_update()
        except WeightSyncError as error:
            self.version -= 1
            return str(error)
        return ""

    def update_wrongly(self, engine: Engine, fault: Callable[..., None]) -> str:
        """The first weights again, loaded by a receiver with a mistake."""
        load = receiver.FileWeightTransferEngine.load

        def load_wrongly(worker: Any, tensors: Any) -> None:
            fault(worker.model, tensors, lambda tensors: load(worker, tensors))

        receiver.FileWeightTransferEngine.load = load_wrongly
        try:
            return self.update(engine, self.tensors(1))
        finally:
            receiver.FileWeightTransferEngine.load = load


def answers(engine: Engine) -> list[Any]:
    packed = engine.generate(
        [list(prompt.token_ids) for prompt in PROMPTS], list(range(len(PROMPTS))),
        samples=2, max_tokens=6, temperature=1.0, top_p=1.0, top_k=-1, stop_token_ids=[],
    )  # fmt: skip
    return [packed["tokens"].hex(), packed["logprobs"].hex()]


def run_case(case: Case, victim: str) -> dict[str, Any]:
    engine = case.start("live")
    found: dict[str, Any] = {}
    said = [case.update(engine, case.tensors(1))]
    first = answers(engine)
    said.append(case.update(engine, case.tensors(2)))
    found["changes"] = answers(engine) != first
    said.append(case.update(engine, case.tensors(1)))
    found["back"] = answers(engine) == first
    found["said"] = said
    whole = case.tensors(2)
    found["missing"] = case.update(engine, {name: tensor for name, tensor in whole.items() if name != victim})
    found["misshapen"] = case.update(engine, whole | {victim: whole[victim].T.contiguous()})
    found["intact"] = answers(engine) == first
    if case.hf["model_type"] == "mixtral":  # experts whose width needs padding fail at once instead
        found["kept_kernels_show"] = case.update_wrongly(engine, keep_kernels) == "" and answers(engine) != first
    found["unwritten"] = case.update_wrongly(engine, drop(victim))
    case.version += 1  # a torn engine wants a newer version
    found["healed"] = case.update(engine, case.tensors(1)) == "" and answers(engine) == first
    engine.shutdown()
    fresh = case.start("fresh", load_format="safetensors")
    found["fresh"] = answers(fresh) == first
    fresh.shutdown()
    return found


def keep_kernels(model: Any, tensors: Any, load: Callable[[Any], None]) -> None:
    """What vLLM does by itself: experts that have a kernel are not packed again."""
    experts = [layer for layer in model.modules() if isinstance(layer, RoutedExperts)]
    kernels = [layer.quant_method.moe_kernel for layer in experts]
    restore = reload.restore_checkpoint_layout

    def restore_and_keep(model: Any) -> None:
        restore(model)
        for layer, kernel in zip(experts, kernels, strict=True):
            layer.quant_method.moe_kernel = kernel

    reload.restore_checkpoint_layout = restore_and_keep
    try:
        load(tensors)
    finally:
        reload.restore_checkpoint_layout = restore


def drop(victim: str) -> Callable[..., None]:
    """A loader that swallows one expert's tensor after the update was accepted."""

    def load_without(model: Any, tensors: Any, load: Callable[[Any], None]) -> None:
        load([(name, tensor) for name, tensor in tensors if name != victim])

    return load_without


def main() -> None:
    out = Path(sys.argv[1])
    found = {
        "qwen3_moe": run_case(
            Case("qwen3_moe", Format.int8, out / "qwen3_moe"), "model.layers.1.mlp.experts.2.down_proj.weight"
        ),
        "mixtral": run_case(
            Case("mixtral", Format.none, out / "mixtral"), "model.layers.0.block_sparse_moe.experts.3.w1.weight"
        ),
    }
    (out / "found.json").write_text(json.dumps(found))
    os._exit(0)  # no wait for the engines' threads


if __name__ == "__main__":
    main()
