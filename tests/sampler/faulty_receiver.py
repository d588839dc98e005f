"""A worker extension for tests alone: the receiver, with mistakes that can be switched on for one update.

An update directory that holds a file `fault` is loaded wrongly in the way the file names; without one this is
the receiver as shipped. Found by the engine's workers through PYTHONPATH.
"""

from pathlib import Path

import torch
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from megatron_rl.weight_sync.receiver import BACKEND, FileUpdateInfo, FileWeightTransferEngine, WorkerExtension


class FaultyEngine(FileWeightTransferEngine):
    fault: Path

    def receive_weights(self, update_info: FileUpdateInfo) -> None:
        super().receive_weights(update_info)
        self.fault = Path(update_info.directory) / "fault"

    def load(self, tensors) -> None:
        name = self.fault.read_text() if self.fault.exists() else ""
        if name == "kernels_not_rebuilt":
            old = kernels_of(self.model)
            super().load(tensors)
            for layer, handler in old:
                layer.scheme.kernel.dnnl_handler = handler
        elif name == "tied_head_not_refreshed":
            (head,) = [m for m in self.model.modules() if isinstance(m, ParallelLMHead)]
            packed = head.cpu_linear
            super().load(tensors)
            head.cpu_linear = packed
        elif name == "parameter_not_written":
            super().load((key, tensor) for key, tensor in tensors if key != "model.norm.weight")
        else:
            super().load(tensors)


def kernels_of(model: torch.nn.Module) -> list:
    layers = [m for m in model.modules() if isinstance(m, LinearBase)]
    return [(layer, layer.scheme.kernel.dnnl_handler) for layer in layers]


class FaultyExtension(WorkerExtension):
    pass


WeightTransferEngineFactory._registry[BACKEND] = lambda: FaultyEngine
