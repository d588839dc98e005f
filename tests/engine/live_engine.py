"""A tiny engine in this process, its weights by seed, and the versions that reach it."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from simulated import hf_config, quantized_whole, random_hf
from tiny_engine import PROMPTS, make_config

from megatron_rl.config.schema import Config, Format, KvCache
from megatron_rl.engine import receiver, reload
from megatron_rl.engine.engine import Engine
from megatron_rl.models.shape import ModelShape
from megatron_rl.quantization.cache_scales import CacheScales
from megatron_rl.sampler.engine_settings import (
    EngineSettings,
    engine_arguments,
    write_engine_folder,
)
from megatron_rl.weight_sync import file_transport as transport
from megatron_rl.weight_sync.engine_shards import ShardBuffer
from megatron_rl.weight_sync.manifest import WeightSyncError

NUMBERS = count(1)  # of samples
EXPERTS = r"re:.*\.experts\..*"  # hosts have no kernel for quantized experts
SIZES: dict[str, Any] = {
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 2,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "dtype": "bfloat16",
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_moe": hf_config(
        "qwen3_moe", architectures=["Qwen3MoeForCausalLM"], norm_topk_prob=True, **SIZES
    ),
    "mixtral": hf_config(
        "mixtral", architectures=["MixtralForCausalLM"], sliding_window=None, **SIZES
    )
    | {"num_local_experts": 4},
    "qwen3": hf_config("qwen3", architectures=["Qwen3ForCausalLM"], **SIZES),
}


class Alone:
    """A learner of one rank."""

    def max_(self, tensor: torch.Tensor) -> None:
        pass

    def gather(self, tensor: torch.Tensor, received: Sequence[torch.Tensor], rank: int) -> None:
        pass


class EngineCase:
    """Model in one format: its weights by seed, its engine, and the versions that reach it."""

    def __init__(self, family: str, format: Format, folder: Path, **quantization: Any) -> None:
        self.hf = MODELS[family]
        self.folder = folder
        self.version = -1
        config = make_config(format)
        changes = {"ignore": [*config.quantization.ignore, EXPERTS]} | quantization
        self.config: Config = replace(config, quantization=replace(config.quantization, **changes))
        (folder / "hf").mkdir(parents=True)
        (folder / "hf" / "config.json").write_text(json.dumps(self.hf))

    def tensors(self, seed: int) -> dict[str, torch.Tensor]:
        quantization = self.config.quantization
        drawn = random_hf(ModelShape.from_hf(self.hf), torch.float32, seed)
        weights = {
            name: (1 + 0.02 * tensor if tensor.ndim == 1 else 0.1 * tensor).bfloat16()
            for name, tensor in drawn.items()
        }
        quantized = quantized_whole(weights, quantization.format, quantization.ignore)
        return quantized | self.scales(seed)

    def scales(self, seed: int) -> dict[str, torch.Tensor]:
        """Scales of the quantized cache, if there is one."""
        if self.config.quantization.kv_cache == KvCache.none:
            return {}
        made = CacheScales(
            self.hf["num_hidden_layers"], Alone(), lambda: torch.full((2, 2), 4.0 + seed)
        )
        made.begin_sync()
        return dict(made.values())

    def start(self, name: str, **arguments: Any) -> Engine:
        folder = write_engine_folder(
            self.folder / "hf", self.folder / name, self.config.quantization
        )
        if "load_format" in arguments:
            save_file(self.tensors(1), folder / "model.safetensors", {"format": "pt"})
        return Engine(engine_arguments(EngineSettings.from_config(self.config), folder) | arguments)

    def update(self, engine: Engine, tensors: dict[str, torch.Tensor]) -> str:
        """The next version into the engine; what it said against it."""
        self.version += 1
        transport.write_version(
            self.folder, self.version, tensors.items(), format=self.config.quantization.format
        )
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
        prepare = receiver.FileWeightTransferEngine.prepare

        def prepare_wrongly(worker: Any, tensors: dict[str, torch.Tensor]) -> Callable[[], None]:
            load = partial(reload.load, worker.model, worker.model_config, worker.device)
            held = ShardBuffer.of(
                tensors, worker.shards
            )  # as an engine has them that loads in place
            return partial(fault, worker.model, held.items(), load)

        receiver.FileWeightTransferEngine.prepare = prepare_wrongly
        try:
            return self.update(engine, self.tensors(1))
        finally:
            receiver.FileWeightTransferEngine.prepare = prepare


def begin(engine: Engine, max_tokens: int, **more: Any) -> list[int]:
    """Two samples of each prompt, as one question; their numbers."""
    numbers = []
    for seed, prompt in enumerate(PROMPTS):
        for sample in range(2):
            numbers.append(next(NUMBERS))
            engine.samples.begin(
                numbers[-1],
                tokens=list(prompt.token_ids),
                seed=seed + sample,
                max_tokens=max_tokens,
                **more,
            )
    return numbers


def answers(engine: Engine) -> list[Any]:
    numbers = begin(engine, 6)
    said = dict(reply for _ in range(6) for reply in engine.samples.step())
    assert not engine.samples, "six tokens each, in six steps"
    return [
        [said[number].token_ids.tobytes().hex(), said[number].logprobs.tobytes().hex()]
        for number in numbers
    ]


def attempt(call: Callable[[], Any]) -> str:
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return ""


def model_of(engine: Engine) -> Any:
    return engine.llm.llm_engine.model_executor.driver_worker.worker.model_runner.model
