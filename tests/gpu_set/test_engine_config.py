"""vLLM's engine configuration of every recipe on a mocked H100 and B200. No kernel runs."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mocked_gpu
import pytest
from mocked_gpu import B200, H100, Device
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.worker.utils import request_memory

from megatron_rl.apps.planner.case import Case
from megatron_rl.apps.planner.phases import SHARE, largest_share
from megatron_rl.apps.planner.plan import plan
from megatron_rl.config import cluster, load
from megatron_rl.config.schema import Config, Sleep, Transport
from megatron_rl.preflight.files import read_card
from megatron_rl.preflight.machine import named
from megatron_rl.sampler.engine_settings import (
    EngineSettings,
    engine_arguments,
    write_engine_folder,
)

ROOT = Path(__file__).parents[2]
RECIPES = sorted(path for path in (ROOT / "recipes").glob("*.yaml") if cluster(path)[0])
COLOCATED = [path for path in RECIPES if load(path).sampler.sleep != Sleep.none]


def engine_config(config: Config, folder: Path, device: Device, patch: pytest.MonkeyPatch) -> Any:
    """As the engine's own process would make it."""
    mocked_gpu.pretend(patch, device)
    model = folder / "model"
    model.mkdir()
    shutil.copy(
        ROOT / "conf" / "model" / f"{Path(config.model.path).name}.json", model / "config.json"
    )
    settings = EngineSettings.from_config(config)
    settings = settings.with_format(settings.formats[0])
    engine = write_engine_folder(model, folder / "engine", settings.quantization)
    return EngineArgs(**engine_arguments(settings, engine)).create_engine_config()


@pytest.mark.parametrize(
    "device",
    [H100, B200],
    ids=lambda device: device.name.split()[1],
)
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_every_recipe_s_engine(
    recipe: Path, device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load(recipe)
    made = engine_config(config, tmp_path, device, monkeypatch)
    longest = config.rollout.max_prompt_tokens + config.rollout.max_response_tokens
    assert made.model_config.max_model_len >= longest
    assert made.parallel_config.tensor_parallel_size == config.sampler.tensor_parallel
    assert made.model_config.quantization == (
        None if config.quantization.format == "none" else "compressed-tensors"
    )
    assert made.compilation_config.cudagraph_mode.name == "FULL_AND_PIECEWISE"
    most = config.sampler.vllm["max_num_seqs"]
    assert made.scheduler_config.max_num_seqs == most
    assert most <= made.compilation_config.max_cudagraph_capture_size < most + 16
    assert made.weight_transfer_config.backend == config.sync.transport
    assert made.cache_config.gpu_memory_utilization == config.sampler.vllm["gpu_memory_utilization"]


def test_what_offline_nodes_would_wait_for_is_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels that a library compiles or downloads at the start."""
    made = engine_config(load(ROOT / "recipes" / "dapo_int8.yaml"), tmp_path, H100, monkeypatch)
    assert made.kernel_config.enable_flashinfer_autotune is False
    assert made.compilation_config.pass_config.fuse_allreduce_rms is False


@pytest.mark.parametrize("transport", [Transport.ipc, Transport.nccl])
def test_vllm_s_own_transports(
    transport: Transport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load(ROOT / "recipes" / "dapo_int8.yaml", [f"sync.transport={transport}"])
    made = engine_config(config, tmp_path, H100, monkeypatch)
    assert made.weight_transfer_config.backend == f"checked_{transport}"


def test_blocks_of_fp8_on_hopper_and_an_fp8_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = [
        "quantization.format=fp8_block",
        "sampler.tensor_parallel=1",
        "sampler.devices='4'",
    ]
    config = load(ROOT / "recipes" / "dapo_fp8.yaml", [*overrides, "quantization.kv_cache=fp8"])
    made = engine_config(config, tmp_path, H100, monkeypatch)
    assert made.model_config.quantization == "compressed-tensors"
    assert made.cache_config.cache_dtype.startswith("fp8")
    written = json.loads((tmp_path / "engine" / "config.json").read_text())
    assert written["quantization_config"]["kv_cache_scheme"]["num_bits"] == 8


@pytest.mark.parametrize("recipe", COLOCATED, ids=lambda recipe: recipe.stem)
def test_an_engine_starts_alone_with_the_share_that_the_plan_finds(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's own look at the memory, with what the plan says is free: the largest share passes, the
    next does not.
    """
    config = load(recipe)
    where = f"1x{named(str(cluster(recipe)[1])).gpus}xH100-80"
    found = plan(Case(config, read_card(config.model.path), named(where))).memory
    (memory,) = [one for one in found if one.kind == "learner and engine"]
    share = largest_share(memory)
    assert share is not None
    assert memory.limit is not None
    beside = sum(n for part, n in memory.phases["start"].items() if part not in SHARE)
    alone = largest_share(replace(memory, phases={"start": memory.phases["start"]}))
    assert alone is not None
    assert share < alone  # the learner's part in the other moments
    word = [f"sampler.vllm.gpu_memory_utilization={share}"]
    made = engine_config(load(recipe, word), tmp_path, H100, monkeypatch)
    snapshot: Any = SimpleNamespace(
        total_memory=int(memory.limit), free_memory=int(memory.limit - beside), device_="cuda:0"
    )
    assert request_memory(snapshot, made.cache_config) == pytest.approx(share * memory.limit)
    made.cache_config.gpu_memory_utilization = round(alone + 0.01, 2)
    with pytest.raises(ValueError, match="memory utilization"):
        request_memory(snapshot, made.cache_config)
