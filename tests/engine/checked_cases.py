"""Cases of engine_cases: an engine behind a transport of vLLM's kind, and its
sleep.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec
import torch
from live_engine import EngineCase, answers, attempt, model_of
from update_cases import run_layerwise
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from megatron_rl.engine.engine import Engine
from megatron_rl.engine.vllm_receiver import Checked
from megatron_rl.models.tensors import TensorSpec
from megatron_rl.weight_sync import wire
from megatron_rl.weight_sync.manifest import WeightSyncError
from megatron_rl.weight_sync.vllm_push import Relay
from megatron_rl.weight_sync.wire import Announcement, Seal, read_checksums

CHECKED_VICTIM = "model.layers.1.mlp.down_proj.weight"


@dataclass
class InMemoryUpdate(WeightTransferUpdateInfo):
    names: list[str]


class InMemoryEngine(WeightTransferEngine[WeightTransferInitInfo, InMemoryUpdate]):
    """A transport of vLLM's kind that works on hosts: tensors arrive in chunks and go
    where `self.model` points.
    """

    init_info_cls = WeightTransferInitInfo
    update_info_cls = InMemoryUpdate
    memory: ClassVar[dict[str, torch.Tensor]] = {}

    def init_transfer_engine(self, init_info: WeightTransferInitInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: InMemoryUpdate) -> None:
        self.model.load_weights([(name, self.memory[name]) for name in update_info.names])

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        pass


class CheckedInMemory(Checked, InMemoryEngine):
    pass


WeightTransferEngineFactory.register_engine("checked_in_memory", CheckedInMemory)
CHECKED: dict[str, Any] = {
    "weight_transfer_config": {"backend": "checked_in_memory"},
    "worker_extension_cls": "megatron_rl.engine.vllm_receiver.WorkerExtension",
}


class Sender:
    """Sends like VllmPush on rank 0, over its relay, with one fault on the way."""

    def __init__(self, case: EngineCase, engine: Engine) -> None:
        self.case, self.engine, self.relay = case, engine, Relay(self)

    # SamplerClient
    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.engine.init_weight_transfer_engine(init_info)

    def start_weight_update(self) -> None:
        self.engine.start_weight_update()

    def update_weights(self, update_info: Any) -> None:
        self.engine.update_weights(msgspec.msgpack.decode(msgspec.msgpack.encode(update_info)))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        assert str(self.engine.finish_weight_update()["policy_version"]) == weight_version

    def send(self, seed: int, fault: str = "") -> str:
        """The next version; what was said against it."""
        case, sent = self.case, self.case.tensors(seed)
        version = case.version + 1
        format = case.config.quantization.format.value
        announced = [TensorSpec.of(name, tensor) for name, tensor in sent.items()]
        sums = {name: wire.checksum(tensor) for name, tensor in sent.items()}
        InMemoryEngine.memory = {name: tensor.clone() for name, tensor in sent.items()}
        chunks = [list(sent)[i : i + 7] for i in range(0, len(sent), 7)]
        if fault == "unannounced":
            announced = announced[:-1]
        if fault == "stale":
            version = case.version
        if fault == "flipped byte":
            InMemoryEngine.memory[CHECKED_VICTIM].view(torch.uint8)[0, 0] ^= 1
        if fault == "lost chunk":
            del chunks[1]
        if fault == "sent twice":
            chunks.append(chunks[0])
        try:
            self.relay.begin()
            self.update_weights(Announcement(version, format, tuple(announced)).message())
            for names in chunks:
                self.relay.update_weights({"names": names})
            if self.relay.failure:
                return self.relay.failure
            if fault == "abandoned":
                self.relay.abandon("rank 3 could not send")
                return "abandoned"
            self.update_weights(Seal(version, read_checksums(sums)).message())
            self.finish_weight_update(str(version))
        except WeightSyncError as error:
            return str(error)
        case.version = version
        return ""


FAULTS = ("unannounced", "stale", "flipped byte", "lost chunk", "sent twice", "abandoned")


def run_checked(case: EngineCase) -> dict[str, Any]:
    """Faults on an INT8 engine, and what they leave."""
    engine = case.start("live", **CHECKED)
    sender = Sender(case, engine)
    found = {"staged": {}, "intact": []}
    found["said"] = [sender.send(1)]
    first = answers(engine)
    found["said"].append(sender.send(2))
    second = answers(engine)
    found["changes"] = second != first
    for fault in FAULTS:
        found["staged"][fault] = sender.send(1, fault)
        found["intact"].append(answers(engine) == second)
    found["said"].append(sender.send(1))
    found["back"] = answers(engine) == first
    found |= run_held(engine, sender, first)
    found["sleep"] = run_sleep(engine, sender)
    found["layerwise"] = run_layerwise(engine, case.tensors(1))
    engine.shutdown()
    return found


def run_held(engine: Engine, sender: Sender, wanted: Any) -> dict[str, Any]:
    """Blocks of the cache in use, which vLLM then refuses to reset."""
    pool = engine.llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    held = pool.get_new_blocks(1)
    found = {"held": attempt(lambda: sender.send(2))}
    found["refused while held"] = attempt(lambda: answers(engine))
    pool.free_blocks(held)
    sender.case.version += 1
    sender.send(1)
    return found | {"reset": answers(engine) == wanted}


def run_sleep(engine: Engine, sender: Sender) -> dict[str, Any]:
    """vLLM's own calls, which free nothing on hosts; the order, and what may be asked when."""
    before = answers(engine)
    found = {}
    engine.sleep(1)
    found["asleep"] = attempt(lambda: answers(engine))
    found["update asleep"] = attempt(lambda: sender.send(2))
    engine.wake(None)
    found["same"] = answers(engine) == before
    engine.sleep(2)
    engine.wake(["weights"])
    found["cache asleep"] = attempt(lambda: answers(engine))
    found["refused sync"] = sender.send(2, "flipped byte")
    found["synced"] = sender.send(2)
    found["synced, cache asleep"] = attempt(lambda: answers(engine))
    engine.wake(["kv_cache"])
    found["new"] = attempt(lambda: answers(engine)) == "" and answers(engine) != before
    engine.sleep(2)
    engine.wake(None)
    found["discarded"] = attempt(lambda: answers(engine))
    sender.send(2)
    engine.sleep(1)
    layer = next(m for m in model_of(engine).modules() if isinstance(m, Attention))
    layer._k_scale.fill_(3.0)  # what a device that lost its memory would do
    found["lost scale"] = attempt(lambda: engine.wake(None))
    layer._k_scale.fill_(1.0)
    return found
