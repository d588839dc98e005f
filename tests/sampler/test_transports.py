"""`nccl` to several engines: vLLM's two sides and everything of ours, with gloo in the place
of NCCL alone.
"""

import os
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from preloaded import forking
from simulated import local_parameters
from test_embedded import served_by_each
from tiny_engine import Live, TinyModel, make_model, make_settings

from megatron_rl.config.schema import Format, SyncSection, Transport
from megatron_rl.engine.messages import checked
from megatron_rl.models.layout import Layout, Place
from megatron_rl.models.model import Model
from megatron_rl.models.shape import ModelShape
from megatron_rl.models.shards import ShardGroups
from megatron_rl.sampler.replica import Replica
from megatron_rl.sampler.sampler import Sampler
from megatron_rl.sampler.supervisor import SamplerState
from megatron_rl.weight_sync import wire
from megatron_rl.weight_sync.manifest import WeightSyncError
from megatron_rl.weight_sync.source import ShardSource
from megatron_rl.weight_sync.transports import Push

pytestmark = pytest.mark.engine


class TransportRun(Live):
    push: Push
    version = -1

    def update(self, seed: int, fault: Any = None) -> str | None:
        """The next version; why it was not sent."""
        shards = local_parameters(
            self.model.weights(seed),
            shape_of(self.model),
            Layout(),
            Place(),
        )
        sent = self.push.send(self.version + 1, shards)
        if sent.failure:
            self.push.forget(self.version + 1)
        else:
            self.push.load(self.version + 1)
            self.version += 1
        return sent.failure


def shape_of(model: TinyModel) -> ModelShape:
    return ModelShape.from_hf(model.hf.to_dict())


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TransportRun]:
    import gloo_receiver  # imports vLLM, which takes seconds: not at test collection

    from megatron_rl.weight_sync import vllm_push

    for place in gloo_receiver.PLACES:
        monkeypatch.setattr(*place)
    for name, value in (
        (gloo_receiver.FLIP, str(tmp_path / "flip")),
        ("PYTHONPATH", os.pathsep.join(sys.path)),
    ):
        monkeypatch.setenv(name, value)
    unpacked = vllm_push.NCCLTrainerInitInfo  # packed tensors travel on streams of a device
    monkeypatch.setattr(vllm_push, "NCCLTrainerInitInfo", partial(unpacked, packed=False))
    model = make_model(tmp_path / "hf", True)
    settings = replace(make_settings(engines=2), transport=Transport.nccl)
    source = ShardSource(
        Model(shape_of(model), Layout(), {}),
        ShardGroups(),
        Format.none,
    )
    sampler = Sampler(
        settings, model.folder, tmp_path, worker_extension="gloo_receiver.GlooExtension"
    )
    with forking(), sampler:
        made = TransportRun(sampler, model, Format.none, tmp_path)
        made.push = vllm_push.VllmPush(
            source, sampler, SyncSection(transport=Transport.nccl), settings.sampler
        )
        yield made


@pytest.mark.fault(
    "one of two engines gets a wrong byte by `nccl`",
    "neither loads it; both serve the version before",
)
@pytest.mark.fault(
    "an engine of a group of NCCL is lost", "the next update ends the run, and names the engine"
)
def test_two_engines_take_what_is_broadcast(run: TransportRun) -> None:
    assert run.update(1) is None
    assert served_by_each(run) == [0, 0]
    first = run.rollouts()
    assert run.update(2) is None
    second = run.rollouts()
    assert [one.token_ids for one in second] != [one.token_ids for one in first]
    for rank in "12":
        (run.directory / "flip").write_text(rank)
        with pytest.raises(WeightSyncError, match="corrupt tensor"):
            run.update(1)
        assert served_by_each(run) == [1, 1]
        assert run.rollouts() == second
    assert run.update(1) is None
    assert [one.token_ids for one in run.rollouts()] == [one.token_ids for one in first]
    run.kill(1)
    name = re.escape(run.sampler.replicas[1].name)
    assert re.match(f"{name} is lost.*--attempts", run.update(2) or "")
    assert len(run.rollouts()) == 12, "the other one answers"


def test_init_info_of_engines_is_valid_in_vllm() -> None:
    """Rank 0's settings, what each of two engines gets of them, and every form at the door."""
    from vllm.distributed.weight_transfer.nccl_common import worker_init_payload

    from megatron_rl.engine.vllm_receiver import CheckedIPC, CheckedNCCL
    from megatron_rl.weight_sync.vllm_push import init_info

    trainer = init_info(Transport.nccl, 4, 0, ("node7", 1234), 1)
    assert trainer.world_size == 5
    shared = {name: value for name, value in vars(trainer).items() if name != "rank"}
    state = SamplerState(1.0, 1.0, 48, 101, print)
    state.init_info = worker_init_payload(CheckedNCCL.init_info_cls(rank_offset=1, **shared))
    infos = [
        state.init_of(Replica("", Format.none, None, before))["init_info"] for before in (0, 2)
    ]
    assert [CheckedNCCL.init_info_cls(**one).rank_offset for one in infos] == [1, 3]
    named = {
        "names": ["w"],
        "dtype_names": ["int8"],
        "shapes": [[2, 3]],
    }
    handle = torch.Tensor, torch.Size([6]), (1,), 0, torch.int8, b"h" * 64, None, True
    packed = named | {"ipc_handles": wire.encode_handles({"GPU-1": handle}), "tensor_sizes": [6]}
    announced = wire.Announcement(
        1,
        "int8",
        (wire.TensorSpec("w", "int8", (2, 3)),),
    )
    around = announced.message(), wire.Seal(1, {"w": (-1, 2**62)}).message(), {wire.ABANDON: "why"}
    for engine, init, update in (
        (CheckedNCCL, infos[1], named),
        (CheckedIPC, {"packed": True}, packed),
    ):
        assert engine.parse_init_info(engine, init)
        assert engine.parse_update_info(engine, update)
    asked = [("update_weights", {"update_info": one}) for one in (named, *around)]
    asked.append(("init_weight_transfer_engine", {"init_info": infos[1]}))
    frames = [{"id": 1, "method": method, "arguments": arguments} for method, arguments in asked]
    requests, refused = checked(msgspec.msgpack.encode(frames), 101, 48, "nccl")
    assert (len(requests), refused) == (5, [])


def test_rank_0_is_found_where_the_first_server_elsewhere_sees_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from megatron_rl.weight_sync import vllm_push

    assert vllm_push.meeting_place(["http://localhost:1"])[0] == "127.0.0.1"
    monkeypatch.setattr(vllm_push, "LOOPBACK", "nowhere")
    monkeypatch.setattr(vllm_push, "is_loopback", lambda address: address == "near")
    assert vllm_push.meeting_place(["near", "http://127.0.0.3:8000"])[0] == "127.0.0.1"
