"""Cases of engine_cases: vLLM's trainer side as far as it goes without a GPU."""

from typing import Any
from unittest import mock

from live_engine import MODELS, Alone
from simulated import local_parameters, quantized_whole, random_hf
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerWeightTransferEngine

from megatron_rl.config.schema import Format, SamplerSection, SyncSection, Transport
from megatron_rl.engine.vllm_receiver import Checked
from megatron_rl.models.layout import Layout, Place
from megatron_rl.models.model import Model
from megatron_rl.models.shape import ModelShape
from megatron_rl.models.shards import ShardGroups
from megatron_rl.weight_sync.source import ShardSource
from megatron_rl.weight_sync.unsharded_source import UnshardedSource
from megatron_rl.weight_sync.vllm_push import UnshardedTensors, VllmPush, init_info


def run_trainer() -> dict[str, Any]:
    """vLLM's trainer side as far as it goes without a GPU: its sources, its settings, its refusal."""
    shape = ModelShape.from_hf(MODELS["qwen3"] | {"vocab_size": 102})
    hf = random_hf(shape)
    found = {}

    def source() -> ShardSource:
        return ShardSource(
            Model(shape, Layout(), {}),
            ShardGroups(tensor=Alone(), expert_tensor=Alone()),
            Format.int8,
        )

    whole = UnshardedSource(source(), everywhere=False)
    tensors = UnshardedTensors(whole)
    shards = local_parameters(hf, shape, Layout(), Place())
    whole.begin(shards)
    sent = list(NCCLTrainerWeightTransferEngine._checked_iter(tensors, tensors.metadata()))
    found["sent"] = len(sent) == len(quantized_whole(hf, Format.int8))
    whole.begin(shards)
    unlike = [*tensors.metadata()[1:], tensors.metadata()[0]]
    try:
        list(NCCLTrainerWeightTransferEngine._checked_iter(tensors, unlike))
    except ValueError as error:
        found["out of step"] = str(error)
    for name in Transport:
        if name == Transport.file:
            continue
        section = SyncSection(transport=name)
        engine = SamplerSection(tensor_parallel=2)
        small, large = (
            init_info(name, 2, 0, ("node7", 12345), largest) for largest in (1, 3 << 30)
        )
        found[f"{name} settings"] = [
            small.backend,
            small.is_sender,
            init_info(name, 2, 1, ("", 1), 1).is_sender,
        ]
        found[f"{name} buffers"] = [small.packed_buffer_size_bytes, large.packed_buffer_size_bytes]
        listener = mock.Mock()
        push = VllmPush(source(), listener, section, engine)
        found[f"{name} without a GPU"] = push.send(1, shards).failure
        push.close()
        calls = {name for name, *_ in listener.method_calls}
        assert "update_weights" not in calls, "nothing was announced that cannot be sent"
        registered = WeightTransferEngineFactory._registry[f"checked_{name}"]()
        found[f"{name} receiver"] = [registered.__name__, issubclass(registered, Checked)]
    return found
