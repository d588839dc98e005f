"""A worker extension for tests alone: the receiver, with mistakes that can be switched on
for one update.

An update directory that holds a file `fault` is loaded wrongly in the way the file names; without
one this is the receiver as shipped. Found by the engine's workers through PYTHONPATH.
"""

import os
import signal
from pathlib import Path

import torch
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from megatron_rl.engine.receiver import (
    BACKEND,
    FileUpdateInfo,
    FileWeightTransferEngine,
    WorkerExtension,
)


class FaultyEngine(FileWeightTransferEngine):
    def receive_weights(self, update_info: FileUpdateInfo) -> None:
        self.fault = Path(update_info.directory) / "fault"
        self.version = update_info.policy_version
        super().receive_weights(update_info)

    def prepare(self, tensors):
        name = self.fault.read_text() if self.fault.exists() else ""
        # after the check, before anything is loaded
        for path in self.fault.parent.glob(f"v*{self.version}/*.bin"):
            if name == "changed_after_the_check":
                path.write_bytes(bytes(byte ^ 1 for byte in path.read_bytes()))
            elif name == "cut_after_the_check":
                os.truncate(path, path.stat().st_size // 2)
        if name == "parameter_not_written":
            tensors = {key: tensor for key, tensor in tensors.items() if key != "model.norm.weight"}
        if name in MISPLACED:
            tensors = MISPLACED[name](dict(tensors.items()))
        make_live = super().prepare(tensors)
        if name == "killed_while_building" or (
            name == "second_worker_killed" and get_tensor_model_parallel_rank()
        ):
            self.fault.unlink()  # once: the engine that is started in its place is left alone
            os.kill(os.getpid(), signal.SIGKILL)

        def make_live_wrongly() -> None:
            if name == "kernels_not_rebuilt":
                old = kernels_of(self.model)
                # oneDNN reads the scales where they lay: without them the wrong answers would be
                # NaN, which stays in the cache and spoils those of the next version as well
                self.kept = [layer.weight_scale for layer, _ in old]
                make_live()
                for layer, handler in old:
                    layer.scheme.kernel.dnnl_handler = handler
            elif name == "tied_head_not_refreshed":
                (head,) = [m for m in self.model.modules() if isinstance(m, ParallelLMHead)]
                packed = head.cpu_linear
                make_live()
                head.cpu_linear = packed
            elif name == "stopped_half_way":
                raise RuntimeError("stopped half-way")
            else:
                make_live()

        return make_live_wrongly


def exchanged(first: str, second: str):
    """The tensors of two modules, of one shape, each under the other's name."""

    def change(tensors):
        def name(key):
            other = {first: second, second: first}.get(key.rpartition(".")[0])
            return key if other is None else f"{other}.{key.rpartition('.')[2]}"

        return {name(key): tensor for key, tensor in tensors.items()}

    return change


def heads_exchanged(tensors):
    """Query heads 1 and 2 of the second layer, of 32 rows each."""
    rows = torch.cat(
        (
            torch.arange(32),
            torch.arange(64, 96),
            torch.arange(32, 64),
            torch.arange(96, 128),
        )
    )
    q_proj = "model.layers.1.self_attn.q_proj"
    return {
        key: tensor[rows] if key.rpartition(".")[0] == q_proj else tensor
        for key, tensor in tensors.items()
    }


MISPLACED = {
    "layers_exchanged": exchanged("model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj"),
    "gate_and_up_exchanged": exchanged(
        "model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj"
    ),
    "norms_exchanged": exchanged(
        "model.layers.0.input_layernorm", "model.layers.1.input_layernorm"
    ),
    "heads_exchanged": heads_exchanged,
}


def kernels_of(model: torch.nn.Module) -> list:
    layers = [m for m in model.modules() if isinstance(m, LinearBase)]
    return [(layer, layer.scheme.kernel.dnnl_handler) for layer in layers]


class FaultyExtension(WorkerExtension):
    """The extension whose module registers the faulty engine."""


WeightTransferEngineFactory._registry[BACKEND] = lambda: FaultyEngine
