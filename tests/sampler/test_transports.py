"""`nccl` to several engines: vLLM's two sides and everything of ours, with gloo in the place of NCCL alone."""

import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest
from gloo_receiver import FLIP, take_nccl_s_place
from preloaded import forking
from simulated import local_parameters
from tiny_engine import PROMPTS, SAMPLING, TinyModel, make_model, make_settings, until

from megatron_rl.config.schema import FleetSection, Format, SyncSection, Transport
from megatron_rl.models.layout import Layout, Place
from megatron_rl.models.model import Model
from megatron_rl.models.shape import ModelShape
from megatron_rl.models.shards import ShardGroups
from megatron_rl.sampler.sampler import Sampler
from megatron_rl.types import Rollout
from megatron_rl.weight_sync import vllm_push
from megatron_rl.weight_sync.manifest import WeightSyncError
from megatron_rl.weight_sync.source import ShardSource

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="an engine for each of two cores"),
]


class Alone:
    """The tensor group of one rank."""

    size, rank = 1, 0


@dataclass(eq=False)
class Run:
    sampler: Sampler
    model: TinyModel
    push: vllm_push.VllmPush
    flip: Path
    version: int = -1

    def update(self, seed: int) -> str | None:
        """The next version; why it was not sent."""
        shape = ModelShape.from_hf(self.model.hf.to_dict())
        sent = self.push.send(self.version + 1, local_parameters(self.model.weights(seed), shape, Layout(), Place()))
        if sent.failure:
            self.push.forget(self.version + 1)
            return sent.failure
        self.push.load(self.version + 1)
        self.version += 1
        return None

    def rollouts(self) -> list[Rollout]:
        return self.sampler.generate(PROMPTS, SAMPLING, seed=1, first_group=0, step=0)

    def served(self) -> list[int]:
        return [one["policy_version"] for one in self.sampler.health()["engines"]]


@pytest.fixture(params=[{"engines": 2}, {"fleet": FleetSection(replicas=2)}], ids=["children", "servers"])
def run(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    take_nccl_s_place()
    for name, value in ((FLIP, str(tmp_path / "flip")), ("PYTHONPATH", os.pathsep.join(sys.path))):
        monkeypatch.setenv(name, value)
    unpacked = vllm_push.NCCLTrainerInitInfo  # packed tensors travel on streams of a device
    monkeypatch.setattr(vllm_push, "NCCLTrainerInitInfo", partial(unpacked, packed=False))
    model = make_model(tmp_path / "hf", True)
    settings = replace(make_settings(**request.param), transport=Transport.nccl)
    shape = ModelShape.from_hf(model.hf.to_dict())
    source = ShardSource(Model(shape, Layout(), {}), ShardGroups(tensor=Alone(), expert_tensor=Alone()), Format.none)
    sampler = Sampler(settings, model.folder, tmp_path, worker_extension="gloo_receiver.GlooExtension")
    with forking(), sampler:
        section = SyncSection(transport=Transport.nccl)
        push = vllm_push.VllmPush(source, sampler, section, settings.sampler)
        yield Run(sampler, model, push, tmp_path / "flip")


@pytest.mark.fault("one of two engines gets a wrong byte by `nccl`", "neither loads it; both serve the version before")
@pytest.mark.fault("an engine of a group of NCCL is lost", "the next update ends the run, and names the engine")
def test_two_engines_take_what_is_broadcast(run: Run) -> None:
    assert run.update(1) is None
    assert run.served() == [0, 0]
    first = run.rollouts()
    assert run.update(2) is None
    second = run.rollouts()
    assert [one.token_ids for one in second] != [one.token_ids for one in first]
    for rank in "12":
        run.flip.write_text(rank)
        with pytest.raises(WeightSyncError, match="corrupt tensor"):
            run.update(1)
        assert not run.flip.exists()
        assert run.served() == [1, 1]
        assert run.rollouts() == second
    assert run.update(1) is None
    assert [one.token_ids for one in run.rollouts()] == [one.token_ids for one in first]
    lost = run.sampler.replicas[1]
    os.kill(lost.process.pid, signal.SIGKILL)
    until(lambda: lost.given_up is not None)
    failure = run.update(2)
    assert failure.startswith(f"{lost.name} is lost")
    assert "--attempts" in failure
    assert len(run.rollouts()) == 12, "the other one answers"
