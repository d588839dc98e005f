"""The engine on a CUDA device: vLLM's transports, sleep, an FP8 cache, quantized experts. Seen on one
H100 (docs/experiments/gpu-results.md), one test at a time: an engine measures the memory that others take and give back
meanwhile.

One process plays a learner of one rank (on the first GPU), the engine is the embedded one. Every
transport must bring the same answers as files do.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_engine
import torch
from mocked_gpu import SIZES
from simulated import hf_config, local_parameters, random_hf
from tiny_engine import PROMPTS, SAMPLING

from megatron_rl.apps.planner.memory.engine import ASLEEP, CONTEXT
from megatron_rl.config.schema import (
    Config,
    Device,
    Format,
    KvCache,
    QuantizationSection,
    RunSection,
    Sleep,
    SyncSection,
    Transport,
)
from megatron_rl.models.layout import Layout, Place
from megatron_rl.models.model import Model
from megatron_rl.models.shards import ShardGroups
from megatron_rl.rollout.sleep_schedule import SleepSchedule
from megatron_rl.sampler.client.interface import SamplerError
from megatron_rl.sampler.engine_settings import EngineSettings
from megatron_rl.sampler.sampler import Sampler
from megatron_rl.types import Rollout
from megatron_rl.weight_sync import buckets
from megatron_rl.weight_sync.manifest import WeightSyncError
from megatron_rl.weight_sync.push import WeightSync

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.engine,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
two_gpus = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="NCCL wants a GPU for each of its ranks"
)

DENSE = hf_config("qwen3", architectures=["Qwen3ForCausalLM"], **SIZES)
EXPERTS = hf_config(
    "qwen3_moe",
    architectures=["Qwen3MoeForCausalLM"],
    norm_topk_prob=True,
    num_experts_per_tok=2,
    **SIZES | {"moe_intermediate_size": 256},
)


class Weights:
    """A learner of one rank whose weights are drawn anew by seed."""

    def __init__(self, hf: dict[str, Any]) -> None:
        self.model = Model.of(hf, Layout())
        self.groups = ShardGroups()
        self.draw(0)

    def draw(self, seed: int) -> None:
        drawn = {
            name: (1 + 0.02 * tensor if tensor.ndim == 1 else 0.08 * tensor).bfloat16()
            for name, tensor in random_hf(self.model.shape, torch.float32, seed).items()
        }
        parameters = local_parameters(drawn, self.model.shape, Layout(), Place())
        self._parameters = {name: tensor.cuda() for name, tensor in parameters.items()}

    def named_parameters(self) -> list[tuple[str, torch.Tensor]]:
        return list(self._parameters.items())

    def take_cache_amax(self) -> torch.Tensor:
        return torch.full((self.model.shape.layers, 2), 4.0, device="cuda")


class Run:
    """An engine, a learner beside it, and the syncs between them."""

    def __init__(self, config: Config, hf: dict[str, Any], folder: Path) -> None:
        (folder / "hf").mkdir(parents=True)
        (folder / "hf" / "config.json").write_text(json.dumps(hf))
        self.sampler = Sampler(EngineSettings.from_config(config), folder / "hf", folder)
        self.weights = Weights(hf)
        self.sampler.start()
        self.sync = WeightSync(self.weights, self.sampler, config)
        self.version = 0

    def push(self, seed: int) -> list[tuple]:
        self.weights.draw(seed)
        self.sync.push(self.version)
        self.version += 1
        return self.answers()

    def answers(self) -> list[tuple]:
        rollouts: list[Rollout] = self.sampler.generate(PROMPTS, SAMPLING, seed=1)
        return [
            (one.token_ids, tuple(round(value, 3) for value in one.logprobs)) for one in rollouts
        ]

    def close(self) -> None:
        self.sync.close()
        self.sampler.close()


def make_config(
    transport: Transport = Transport.file, format: Format = Format.fp8, **changes: Any
) -> Config:
    vllm = {"max_num_seqs": 16, "gpu_memory_utilization": 0.2, "enforce_eager": True}
    config = tiny_engine.make_config(
        format, devices="1" if transport == Transport.nccl else "0", vllm=vllm
    )
    there = {"run": RunSection(device=Device.cuda), "sync": SyncSection(transport=transport)}
    return replace(config, **there | changes)


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 1 << 16)  # several, and tensors above it
    opened: list[Run] = []

    def open_run(config: Config, hf: dict[str, Any] = DENSE) -> Run:
        opened.append(Run(config, hf, tmp_path / str(len(opened))))
        return opened[-1]

    yield open_run
    for run in opened:
        run.close()


@pytest.mark.parametrize("transport", [Transport.ipc, pytest.param(Transport.nccl, marks=two_gpus)])
def test_every_transport_brings_what_files_bring(transport: Transport, runs: Any) -> None:
    files = runs(make_config())
    wanted = [files.push(seed) for seed in (1, 2)]
    files.close()
    run = runs(make_config(transport))
    assert [run.push(seed) for seed in (1, 2, 1)] == [*wanted, wanted[0]]


def test_a_diverged_learner_leaves_the_version_before(runs: Any) -> None:
    run = runs(make_config(Transport.ipc))
    before = run.push(1)
    run.weights.draw(2)
    run.weights._parameters["decoder.layers.1.mlp.linear_fc2.weight"][0, 0] = torch.nan
    with pytest.raises(WeightSyncError, match="holds NaN"):
        run.sync.push(1)
    assert run.answers() == before


@pytest.mark.parametrize("sleep", [Sleep.offload, Sleep.discard])
@pytest.mark.parametrize("format", [Format.none, Format.fp8])
def test_sleep_gives_memory_back_and_a_sync_brings_the_weights(
    sleep: Sleep, format: Format, runs: Any
) -> None:
    run = runs(make_config(Transport.ipc, format))
    first = run.push(1)
    second = run.push(2)
    assert first != second
    schedule = SleepSchedule(run.sampler, sleep)
    free = torch.cuda.mem_get_info()[0]
    schedule.sleep()
    assert torch.cuda.mem_get_info()[0] > free
    with pytest.raises(SamplerError, match="asleep"):
        run.answers()
    run.weights.draw(1)
    with schedule.syncing():
        run.sync.push(run.version)
    assert run.answers() == first


def test_the_share_is_taken_given_back_and_taken_again(runs: Any) -> None:
    """The plan's assumptions, on any device: start alone, asleep beside an update, awake beside
    the rest.
    """
    config = make_config(Transport.ipc)
    share = 0.5
    vllm = {**config.sampler.vllm, "gpu_memory_utilization": share}
    torch.ones(1, device="cuda")  # this process's own context comes first
    free, total = torch.cuda.mem_get_info()
    run = runs(replace(config, sampler=replace(config.sampler, vllm=vllm)))
    assert free - torch.cuda.mem_get_info()[0] == pytest.approx(share * total, abs=2 * CONTEXT)
    first = run.push(1)
    schedule = SleepSchedule(run.sampler, Sleep.discard)
    schedule.sleep()
    assert free - torch.cuda.mem_get_info()[0] <= ASLEEP
    update = torch.empty(
        int(free - ASLEEP - share * total / 2),
        dtype=torch.uint8,
        device="cuda",
    )
    with pytest.raises(SamplerError, match="memory utilization"):
        # started now it would have no place
        runs(replace(config, sampler=replace(config.sampler, vllm=vllm)))
    del update
    torch.cuda.empty_cache()
    kept = torch.empty(
        int(free - share * total - ASLEEP),
        dtype=torch.uint8,
        device="cuda",
    )
    with schedule.syncing():
        run.sync.push(run.version)
    assert run.answers() == first
    assert len(kept)


@pytest.mark.parametrize(
    ("quantization", "hf"),
    [
        (
            QuantizationSection(format=Format.fp8, kv_cache=KvCache.fp8),
            DENSE,
        ),  # the cache's scales are the version's
        *(
            (QuantizationSection(format=format), EXPERTS)
            for format in (Format.none, Format.int8, Format.fp8)
        ),
    ],
)
def test_updates_reach_every_expert_and_the_cache(
    quantization: QuantizationSection, hf: dict[str, Any], runs: Any
) -> None:
    if quantization.format == Format.int8 and torch.cuda.get_device_capability()[0] >= 10:
        pytest.skip("INT8 has no kernel here")
    run = runs(make_config(quantization=quantization), hf)
    first = run.push(1)
    second = run.push(2)
    assert first != second
    assert run.push(1) == first
