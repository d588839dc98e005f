"""A worker extension for `sync.py` alone: the receiver, which loads in the ordinary way where a
directory asks for it.

Ordinary: in place, with vLLM's own `process_weights_after_loading`, zero-point sums of symmetric
INT8 included. A directory asks with a file named `ordinary`. Found by the engine through
PYTHONPATH.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUInt8ScaledMMLinearKernel

from megatron_rl.engine import reload
from megatron_rl.engine.cpu_kernels import SymmetricInt8Kernel
from megatron_rl.engine.receiver import (
    BACKEND,
    FileUpdateInfo,
    FileWeightTransferEngine,
    WorkerExtension,
)

MARK = "ordinary"


class EitherWay(FileWeightTransferEngine):
    def receive_weights(self, update_info: FileUpdateInfo) -> None:
        self.ordinary = (Path(update_info.directory) / MARK).exists()
        super().receive_weights(update_info)

    def prepare(self, tensors: Mapping[str, torch.Tensor]) -> Callable[[], None]:
        if self.ordinary:
            return partial(self._load, tensors)
        return super().prepare(tensors)

    def _load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        with vllm_packing():
            reload.load(self.model, self.model_config, self.device, tensors.items())
        for layer in self.model.modules():
            if layer._parameters.get("azp_adj") is not None:
                layer.azp_adj = None  # no update carries it


@contextmanager
def vllm_packing() -> Iterator[None]:
    ours = SymmetricInt8Kernel.process_weights_for_onednn
    SymmetricInt8Kernel.process_weights_for_onednn = (
        CPUInt8ScaledMMLinearKernel.process_weights_for_onednn
    )
    try:
        yield
    finally:
        SymmetricInt8Kernel.process_weights_for_onednn = ours


class Extension(WorkerExtension):
    pass


WeightTransferEngineFactory._registry[BACKEND] = lambda: EitherWay
