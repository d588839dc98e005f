"""New weights in the layouts of vLLM's CUDA kernels: its own processing and this project's reload,
in CPU memory under a mocked H100. No kernel runs; the kernels' inputs are compared.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mocked_gpu
import pytest
import torch
from mocked_gpu import EXPERTS, SIZES
from simulated import hf_config, local_parameters, random_hf
from vllm.config import set_current_vllm_config
from vllm.distributed import (
    destroy_model_parallel,
    init_distributed_environment,
    initialize_model_parallel,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader
from vllm.model_executor.model_loader.reload.layerwise import record_metadata_for_reloading
from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
from vllm.utils.torch_utils import set_default_torch_dtype

from megatron_rl.config.schema import (
    Config,
    Device,
    Format,
    QuantizationSection,
    RolloutSection,
    RunSection,
)
from megatron_rl.engine import expectation, reload
from megatron_rl.models.layout import Layout, Place
from megatron_rl.models.model import Model
from megatron_rl.models.shards import ShardGroups
from megatron_rl.sampler.client.engine_process import engine_environment
from megatron_rl.sampler.engine_settings import (
    EngineSettings,
    engine_arguments,
    write_engine_folder,
)
from megatron_rl.weight_sync.source import ShardSource

HOST = torch.device("cpu")
NAMES = {
    "qwen3": "Qwen3",
    "qwen2": "Qwen2",
    "llama": "Llama",
    "qwen3_moe": "Qwen3Moe",
    "mixtral": "Mixtral",
}
CASES = [
    ("qwen3", Format.none),
    ("qwen3", Format.int8),
    ("qwen3", Format.fp8),
    ("qwen3", Format.fp8_block),
    ("qwen2", Format.int8),
    ("qwen3_moe", Format.int8),
    ("qwen3_moe", Format.fp8),
    ("mixtral", Format.fp8),
]
# of a product with normal weights, what rounding them costs
ERRORS = {Format.none: 0.0, Format.int8: 0.012, Format.fp8: 0.03, Format.fp8_block: 0.03}


@dataclass
class ReloadEngine:
    model: Any
    model_config: Any
    policy: Model
    format: Format

    def sent(self, seed: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Weights by seed, and what a learner of one rank makes of them."""
        drawn = {
            name: (1 + 0.02 * tensor if tensor.ndim == 1 else 0.08 * tensor).bfloat16()
            for name, tensor in random_hf(self.policy.shape, torch.float32, seed).items()
        }
        source = ShardSource(self.policy, ShardGroups(), self.format, ["lm_head"])
        sent = dict(
            source.tensors(
                local_parameters(
                    drawn,
                    self.policy.shape,
                    Layout(),
                    Place(),
                )
            )
        )
        assert source.failure is None, source.failure
        return drawn, sent

    def load(self, tensors: dict[str, torch.Tensor]) -> None:
        with set_default_torch_dtype(torch.bfloat16), HOST:
            reload.load_layerwise(self.model, self.model_config, tensors.items())

    def state(self) -> dict[str, torch.Tensor]:
        return {name: _bytes(weight).clone() for name, weight in self.model.named_parameters()}

    def places(self) -> dict[str, int]:
        return {name: weight.data_ptr() for name, weight in self.model.named_parameters()}


def _bytes(weight: torch.Tensor) -> torch.Tensor:
    return weight.detach().contiguous().view(torch.uint8)


@contextmanager
def engine(
    family: str, format: Format, folder: Path, patch: pytest.MonkeyPatch
) -> Iterator[ReloadEngine]:
    torch._dynamo.config.disable = True  # its compiler asks the driver
    patch.setenv("VLLM_USE_DEEP_GEMM", engine_environment()["VLLM_USE_DEEP_GEMM"])
    mocked_gpu.pretend(patch, mocked_gpu.H100)
    mocked_gpu.tensors_on_host(patch)
    hf = hf_config(
        family, architectures=[f"{NAMES[family]}ForCausalLM"], **SIZES | EXPERTS.get(family, {})
    )
    (folder / "hf").mkdir()
    (folder / "hf" / "config.json").write_text(json.dumps(hf))
    config = Config(
        run=RunSection(device=Device.cuda),
        quantization=QuantizationSection(format=format),
        rollout=RolloutSection(max_prompt_tokens=24, max_response_tokens=24),
    )
    settings = EngineSettings.from_config(config)
    arguments = engine_arguments(
        settings, write_engine_folder(folder / "hf", folder / "engine", config.quantization)
    )
    made = EngineArgs(**arguments | {"enforce_eager": True}).create_engine_config()
    with set_current_vllm_config(made):
        if not torch.distributed.is_initialized():
            init_distributed_environment(1, 0, f"file://{folder}/store", 0, "gloo")
        destroy_model_parallel()  # its groups are those of the model before
        initialize_model_parallel(1, 1)
        with set_default_torch_dtype(torch.bfloat16), HOST:
            model = initialize_model(made)
            record_metadata_for_reloading(model)
            DummyModelLoader(made.load_config).load_weights(model, made.model_config)
            process_weights_after_loading(model, made.model_config, HOST)
        yield ReloadEngine(model, made.model_config, Model.of(hf, Layout()), format)


@pytest.mark.parametrize(
    ("family", "format"),
    CASES,
    ids=lambda value: str(value),
)
def test_weights_arrive_where_the_kernels_read_them(
    family: str, format: Format, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine(family, format, tmp_path, monkeypatch) as at:
        drawn, first = at.sent(1)
        expected, _ = expectation.expected_tensors(at.model, at.policy.shape.tied)
        assert {name: tuple(spec.shape) for name, spec in expected.items()} == {
            name: tuple(tensor.shape) for name, tensor in first.items()
        }
        places = at.places()
        at.load(first)
        loaded = at.state()
        at.load(at.sent(2)[1])
        changed = at.state()
        assert all(not torch.equal(changed[name], was) for name, was in loaded.items()), (
            "every parameter changes"
        )
        at.load(first)
        again = at.state()
        assert all(torch.equal(again[name], was) for name, was in loaded.items()), (
            "the same bytes the second time"
        )
        assert at.places() == places, "CUDA graphs read where they were captured"
        _compare(at, drawn, format)


def _compare(at: ReloadEngine, drawn: dict[str, torch.Tensor], format: Format) -> None:
    """Compare one layer's weights as its kernel would read them."""
    layer = at.model.model.layers[1].self_attn.o_proj
    weight = layer.weight.float()
    scale = getattr(layer, "weight_scale", None)
    wanted = drawn["model.layers.1.self_attn.o_proj.weight"].float()
    if format in (Format.int8, Format.fp8):  # Cutlass wants columns next to each other
        assert layer.weight.stride(0) == 1
        weight = weight.t() * scale.reshape(-1, 1)
    elif format == Format.fp8_block:
        blocks = scale.float().repeat_interleave(128, 0).repeat_interleave(128, 1)
        weight = weight * blocks[: weight.shape[0], : weight.shape[1]]
    error = float((weight - wanted).norm() / wanted.norm())
    assert error <= ERRORS[format]
