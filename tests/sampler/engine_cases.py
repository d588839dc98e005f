"""Live engines, several in one process: run as a script, leaves what it found as JSON.

One process, because importing vLLM takes longer than everything that happens here.
"""

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import torch
from safetensors.torch import save_file
from simulated import hf_config, local_parameters, quantized_whole, random_hf
from tiny_engine import PROMPTS, make_config
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.m2n_common import check_transferable, resolve_layout, validate_layout
from vllm.distributed.weight_transfer.m2n_trainer import M2NTrainerInitInfo, M2NTrainerWeightTransferEngine
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerWeightTransferEngine
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.utils.torch_utils import set_default_torch_dtype

from megatron_rl.sampler import model_folder
from megatron_rl.sampler.child import Engine
from megatron_rl.schema import Config, Format, KvCache, SamplerSection, SyncSection, Transport
from megatron_rl.weight_sync import file_transport as transport
from megatron_rl.weight_sync import receiver, reload, wire
from megatron_rl.weight_sync.cache_scales import CacheScales
from megatron_rl.weight_sync.expectation import cache_scales
from megatron_rl.weight_sync.groups import Ranks
from megatron_rl.weight_sync.layout import Layout, Place
from megatron_rl.weight_sync.manifest import WeightSyncError
from megatron_rl.weight_sync.model_shape import ModelShape
from megatron_rl.weight_sync.quantize import is_quantized, quantize
from megatron_rl.weight_sync.shard_stream import ShardStream
from megatron_rl.weight_sync.source import ShardSource
from megatron_rl.weight_sync.vllm_push import Relay, VllmPush, init_info
from megatron_rl.weight_sync.vllm_receiver import Checked, CheckedM2N
from megatron_rl.weight_sync.vllm_sources import ShardedTensors, WholeTensors
from megatron_rl.weight_sync.whole_source import WholeSource
from megatron_rl.weight_sync.wire import Announcement, Seal, read_checksums

CHECKED_VICTIM = "model.layers.1.mlp.down_proj.weight"
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
    "qwen3": hf_config("qwen3", architectures=["Qwen3ForCausalLM"], **SIZES),
}


class Alone:
    """A learner of one rank."""

    def max_(self, tensor: torch.Tensor) -> None:
        pass

    def gather(self, tensor: torch.Tensor, received: Sequence[torch.Tensor], rank: int) -> None:
        pass


class Case:
    """One model and format: its weights by seed, its engine, and the versions that reach it."""

    def __init__(self, family: str, format: Format, folder: Path, **quantization: Any) -> None:
        self.hf, self.folder, self.version = MODELS[family], folder, -1
        config = make_config(format)
        changes = {"ignore": [*config.quantization.ignore, EXPERTS]} | quantization
        self.config: Config = replace(config, quantization=replace(config.quantization, **changes))
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
        return tensors | self.scales(seed)

    def scales(self, seed: int) -> dict[str, torch.Tensor]:
        """Of the quantized cache, where there is one."""
        if self.config.quantization.kv_cache == KvCache.none:
            return {}
        made = CacheScales(self.hf["num_hidden_layers"], Alone(), lambda: torch.full((2, 2), 4.0 + seed))
        made.begin_sync()
        return dict(made.values())

    def start(self, name: str, **arguments: Any) -> Engine:
        folder = model_folder.write_engine_folder(self.folder / "hf", self.folder / name, self.config)
        if "load_format" in arguments:
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
    found["layerwise"] = [run_layerwise(engine, case.tensors(1)), run_layerwise(engine, whole, victim)]
    engine.shutdown()
    fresh = case.start("fresh", load_format="safetensors")
    found["fresh"] = answers(fresh) == first
    fresh.shutdown()
    return found


def run_layerwise(engine: Engine, tensors: dict[str, torch.Tensor], without: str = "") -> str:
    """The books of the way that GPUs take; a host's kernels are of no use afterwards."""
    runner = engine.llm.llm_engine.model_executor.driver_worker.worker.model_runner
    left = [(name, tensor) for name, tensor in tensors.items() if name != without]
    with torch.no_grad(), set_default_torch_dtype(torch.bfloat16):
        return attempt(lambda: reload.load_layerwise(runner.model, runner.model_config, left))


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


@dataclass
class InMemoryUpdate(WeightTransferUpdateInfo):
    names: list[str]


class InMemoryEngine(WeightTransferEngine[WeightTransferInitInfo, InMemoryUpdate]):
    """A transport of vLLM's kind that works on hosts: tensors arrive in chunks and go where `self.model` points."""

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
    "worker_extension_cls": "megatron_rl.weight_sync.vllm_receiver.WorkerExtension",
}


class Sender:
    """What VllmPush does on rank 0, over the relay that it uses, with one fault on the way."""

    def __init__(self, case: Case, engine: Engine) -> None:
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

    def send(self, seed: int, staged: bool, fault: str = "") -> str:
        """The next version; what was said against it."""
        case, sent = self.case, self.case.tensors(seed)
        version = case.version + 1
        format = case.config.quantization.format.value
        announced = [wire.meta(name, tensor) for name, tensor in sent.items()]
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
            self.relay.announce(Announcement(version, format, staged, tuple(announced)))
            for names in chunks:
                self.relay.update_weights({"names": names})
            if self.relay.failure:
                return self.relay.failure
            if fault == "abandoned":
                self.relay.abandon("rank 3 could not send")
                return "abandoned"
            self.relay.seal(Seal(version, read_checksums(sums)))
            self.relay.finish(version)
        except WeightSyncError as error:
            return str(error)
        case.version = version
        return ""


def attempt(call: Callable[[], Any]) -> str:
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return ""


FAULTS = ("unannounced", "stale", "flipped byte", "lost chunk", "sent twice", "abandoned")


def run_checked(case: Case) -> dict[str, Any]:
    """Staged on an INT8 engine; in place on the same one, as far as a host can: faults, and what they leave."""
    engine = case.start("live", **CHECKED)
    sender, found = Sender(case, engine), {"staged": {}, "in place": {}, "intact": [], "torn": []}
    found["said"] = [sender.send(1, staged=True)]
    first = answers(engine)
    found["said"].append(sender.send(2, staged=True))
    second = answers(engine)
    found["changes"] = second != first
    for fault in FAULTS:
        found["staged"][fault] = sender.send(1, True, fault)
        found["intact"].append(answers(engine) == second)
    found["said"].append(sender.send(1, staged=True))
    found["back"] = answers(engine) == first
    found["sleep"] = run_sleep(engine, sender)
    engine.shutdown()
    return found


def run_in_place(case: Case) -> dict[str, Any]:
    engine = case.start("live", **CHECKED)
    sender, found = Sender(case, engine), {"faults": {}, "refused": {}, "healed": []}
    found["said"] = [sender.send(1, staged=False)]
    first = answers(engine)
    found["said"].append(sender.send(2, staged=False))
    found["changes"] = answers(engine) != first
    for fault in FAULTS:
        found["faults"][fault] = sender.send(2, False, fault)
        found["refused"][fault] = attempt(lambda: answers(engine))
        case.version += 1
        sender.send(1, staged=False)
        found["healed"].append(answers(engine) == first)
    engine.shutdown()
    return found


def run_sleep(engine: Engine, sender: Sender) -> dict[str, Any]:
    """vLLM's own calls, which free nothing on hosts; the order, and what may be asked when."""
    before, found = answers(engine), {}
    engine.sleep(1)
    found["asleep"] = attempt(lambda: answers(engine))
    found["update asleep"] = attempt(lambda: sender.send(2, staged=True))
    engine.wake(None)
    found["same"] = answers(engine) == before
    engine.sleep(2)
    engine.wake(["weights"])
    found["cache asleep"] = attempt(lambda: answers(engine))
    found["refused sync"] = sender.send(2, True, "flipped byte")
    found["synced"] = sender.send(2, staged=True)
    found["synced, cache asleep"] = attempt(lambda: answers(engine))
    engine.wake(["kv_cache"])
    found["new"] = attempt(lambda: answers(engine)) == "" and answers(engine) != before
    engine.sleep(2)
    engine.wake(None)
    found["discarded"] = attempt(lambda: answers(engine))
    sender.send(2, staged=True)
    engine.sleep(1)
    layer = next(m for m in model_of(engine).modules() if isinstance(m, Attention))
    layer._k_scale.fill_(3.0)  # what a device that lost its memory would do
    found["lost scale"] = attempt(lambda: engine.wake(None))
    layer._k_scale.fill_(1.0)
    return found


def model_of(engine: Engine) -> Any:
    return engine.llm.llm_engine.model_executor.driver_worker.worker.model_runner.model


def run_cache(case: Case) -> dict[str, Any]:
    """Scales of an FP8 cache reach the kernels, and change what they answer."""
    engine = case.start("live")
    found: dict[str, Any] = {"said": [case.update(engine, case.tensors(1))]}
    found["scales"] = sorted(set(cache_scales(model_of(engine)).values()))
    first = answers(engine)
    coarse = case.tensors(1) | {name: 40 * scale for name, scale in case.scales(1).items()}
    found["said"].append(case.update(engine, coarse))
    found["coarser"] = answers(engine) != first
    name = next(iter(case.scales(1)))
    found["missing"] = case.update(engine, {key: tensor for key, tensor in case.tensors(1).items() if key != name})
    found["unwritten"] = case.update_wrongly(engine, drop(name))
    case.version += 1
    found["said"].append(case.update(engine, case.tensors(1)))
    found["back"] = answers(engine) == first
    engine.shutdown()
    return found


class Recorder:
    """A sampler that only listens."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.calls.append("init")

    def start_weight_update(self) -> None:
        self.calls.append("start")

    def update_weights(self, update_info: Any) -> None:
        self.calls.append("update")

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.calls.append("finish")


def run_trainer() -> dict[str, Any]:
    """vLLM's trainer side as far as it goes without a GPU: its sources, its settings, its refusal."""
    shape = ModelShape.from_hf(MODELS["qwen3"] | {"vocab_size": 102})
    hf, found = random_hf(shape), {}

    def source(layout: Layout = Layout()) -> ShardSource:  # noqa: B008
        return ShardSource(shape, layout, Ranks(tensor=Alone(), expert_tensor=Alone()), Format.int8)

    whole = WholeSource(source(), everywhere=False)
    tensors = WholeTensors(whole)
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
    sharded = ShardedTensors(ShardStream(source(Layout(tp=2, dp=2))))
    found["mesh"] = [sharded.mesh().dims, sharded.mesh().size]
    for meta in sharded.metadata():
        check_transferable(meta.name, meta.dtype, meta.shape)
        validate_layout(*resolve_layout(sharded.mesh(), meta.placements), meta.shape, "source")
    found["placements"] = sorted({str(meta.placements) for meta in sharded.metadata()})
    for name in Transport:
        if name == Transport.file:
            continue
        config = Config(sync=SyncSection(transport=name, bucket_mib=3), sampler=SamplerSection(tensor_parallel=2))
        info = init_info(config, 0, 12345)
        found[f"{name} settings"] = [info.backend, info.is_sender, getattr(info, "packed_buffer_size_bytes", None)]
        listener = Recorder()
        push = VllmPush(source(), listener, config)
        found[f"{name} without a GPU"] = push.send(1, shards).failure
        push.close()
        assert set(listener.calls) <= {"init"}, "nothing was announced that cannot be sent"
        registered = WeightTransferEngineFactory._registry[f"checked_{name}"]()
        found[f"{name} receiver"] = [registered.__name__, issubclass(registered, Checked)]
    m2n = M2NTrainerWeightTransferEngine(client=Recorder(), source=sharded, is_controller=True, num_trainer_ranks=4)
    m2n._metas, m2n._src_mesh = sharded.metadata(), sharded.mesh()
    settings = M2NTrainerInitInfo(
        rank=0, master_address="127.0.0.1", master_port=1, world_size=6, num_trainer_ranks=4, dst_mesh_dims=(1, 2)
    )
    payload = msgspec.msgpack.decode(msgspec.msgpack.encode(m2n._worker_init_info(settings)))
    found["m2n payload"] = CheckedM2N.init_info_cls(**payload).names == [meta.name for meta in sharded.metadata()]
    return found


def main() -> None:
    out = Path(sys.argv[1])
    runs: dict[str, Callable[[], dict[str, Any]]] = {
        "qwen3_moe": lambda: run_case(
            Case("qwen3_moe", Format.int8, out / "qwen3_moe"), "model.layers.1.mlp.experts.2.down_proj.weight"
        ),
        "mixtral": lambda: run_case(
            Case("mixtral", Format.none, out / "mixtral"), "model.layers.0.block_sparse_moe.experts.3.w1.weight"
        ),
        "checked": lambda: run_checked(Case("qwen3", Format.int8, out / "checked")),
        "in_place": lambda: run_in_place(Case("qwen3", Format.none, out / "in_place")),
        "trainer": run_trainer,
        "cache": lambda: run_cache(Case("qwen3", Format.int8, out / "cache", kv_cache=KvCache.fp8)),
    }
    found = {name: run() for name, run in runs.items() if name in (sys.argv[2:] or runs)}
    (out / "found.json").write_text(json.dumps(found))
    os._exit(0)  # no wait for the engines' threads


if __name__ == "__main__":
    main()
