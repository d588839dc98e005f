"""Which experts a live vLLM model sends the tokens of one sequence to, as its routers themselves tell.

Routers tell Python, which a model that runs as a compiled graph does not come by: this wants an engine with
enforce_eager, which is what hosts run.

S tokens, L layers, K experts of each token.
"""

from __future__ import annotations

from functools import partial

import torch
from vllm.model_executor.layers.fused_moe.layer import MoERunner
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter

NO_EXPERT = -1  # of layers without experts


class Routes:
    """Watches from its making until `end`."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._chosen: dict[int, list[torch.Tensor]] = {}
        self._routers = {
            module.layer_id: module.router
            for module in model.modules()
            if isinstance(module, MoERunner) and isinstance(module.router, BaseRouter)
        }
        for layer, router in self._routers.items():
            router.set_capture_fn(partial(self._see, layer))

    def _see(self, layer: int, ids_SK: torch.Tensor) -> None:
        self._chosen.setdefault(layer, []).append(ids_SK.detach().to("cpu", torch.int32, copy=True))

    def end(self, tokens: int, layers: int) -> bytes:
        """[S, L, K] as int32; nothing where no router told of each token once."""
        for router in self._routers.values():
            router.set_capture_fn(None)
        joined = {layer: torch.cat(parts) for layer, parts in self._chosen.items()}
        if not joined or any(len(ids_SK) != tokens for ids_SK in joined.values()):
            return b""
        found_SLK = torch.full((tokens, layers, next(iter(joined.values())).shape[1]), NO_EXPERT, dtype=torch.int32)
        for layer, ids_SK in joined.items():
            found_SLK[:, layer] = ids_SK
        return found_SLK.numpy().tobytes()
