"""Hooks on a live vLLM model that record modules' outputs by point (models/points.py), or routers'
choices of experts, of one sequence; or, permanently, the experts of every token in a CPU engine's
cache (`CachedChoices`).

The first two are installed for one request and then removed. A compiled graph bypasses hooks, so
that this needs an engine with enforce_eager, as on CPUs.

S tokens, L layers, K experts of each token.
"""

import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor
from vllm.model_executor.layers.fused_moe.layer import MoERunner
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter

from megatron_rl.models.points import Kind, Point
from megatron_rl.types import NO_EXPERT

# names of vLLM's modules in its models of all families; {L} is a layer
OUTPUTS = {
    "model.embed_tokens": Kind.embedding,
    "model.layers.{L}.input_layernorm": Kind.input_norm,
    "model.layers.{L}.self_attn.qkv_proj": Kind.qkv,
    "model.layers.{L}.self_attn.q_norm": Kind.head_norm,
    "model.layers.{L}.self_attn.k_norm": Kind.head_norm,
    "model.layers.{L}.self_attn.attn": Kind.attention,
    "model.layers.{L}.self_attn.o_proj": Kind.o_proj,
    "model.layers.{L}.post_attention_layernorm": Kind.post_norm,
    "model.layers.{L}.mlp.gate_up_proj": Kind.gate_up,
    "model.layers.{L}.mlp.act_fn": Kind.activation,
    "model.layers.{L}.mlp.down_proj": Kind.down,
    "model.norm": Kind.final_norm,
    "logits_processor": Kind.lm_head,
}
EXPERTS = ("model.layers.{L}.mlp", "model.layers.{L}.block_sparse_moe")
ONE_BYTE = 256  # experts that fit into a byte


class ModuleOutputs:
    """Recorder of modules' outputs until `end`. Values are copied at once: vLLM adds into some of
    them later.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._passed: dict[Point, list[Tensor]] = {}
        self._handles = list(self._hooks(model))

    def end(self) -> bytes:
        """Remove the hooks; return the outputs as safetensors."""
        for handle in self._handles:
            handle.remove()
        return save(
            {str(point): _joined(point, values).cpu() for point, values in self._passed.items()}
        )

    def _hooks(self, model: torch.nn.Module) -> Iterator[Any]:
        for name, module in model.named_modules():
            point = _point(name, module)
            if point is None:
                continue
            if point.kind is Kind.attention:
                yield module.register_forward_pre_hook(
                    partial(self._before, Point(Kind.rotary, point.layer))
                )
            yield module.register_forward_hook(partial(self._after, point))

    def _before(self, point: Point, module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        query, key, *_ = args
        self._keep(point, query, key)

    def _after(
        self, point: Point, module: torch.nn.Module, args: tuple[Any, ...], output: Any
    ) -> None:
        # a tuple with a residual or a bias
        self._keep(point, output[0] if isinstance(output, tuple) else output)

    def _keep(self, point: Point, *values: Tensor) -> None:
        self._passed.setdefault(point, []).extend(
            value.detach().clone().flatten(1) for value in values
        )


def _point(name: str, module: torch.nn.Module) -> Point | None:
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    number = int(layer[1]) if layer else None
    plain = re.sub(r"^model\.layers\.\d+\.", "model.layers.{L}.", name)
    if plain in EXPERTS and "experts" in dict(module.named_children()):
        return Point(Kind.experts, number)
    if plain in OUTPUTS:
        return Point(OUTPUTS[plain], number)
    return None


def _joined(point: Point, values: list[Tensor]) -> Tensor:
    """Concatenate queries and keys. Of several logits outputs the last is for the prompt; those
    before are for sampling.
    """
    if point.kind is Kind.lm_head:
        return values[-1].contiguous()
    return torch.cat(values, 1)


class RouterChoices:
    """Recorder of routers' choices until `end`."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._chosen: dict[int, list[Tensor]] = {}
        self._routers = {
            module.layer_id: module.router
            for module in model.modules()
            if isinstance(module, MoERunner) and isinstance(module.router, BaseRouter)
        }
        self._before = {layer: router.capture_fn for layer, router in self._routers.items()}
        for layer, router in self._routers.items():
            router.set_capture_fn(partial(self._see, layer))

    def _see(self, layer: int, ids_SK: Tensor) -> None:
        self._chosen.setdefault(layer, []).append(ids_SK.detach().to("cpu", torch.int32, copy=True))
        if also := self._before[layer]:  # the present input may be another request's cached prefix
            also(ids_SK)

    def end(self, tokens: int, layers: int) -> bytes:
        """Return [S, L, K] as int32; empty if no router reported each token exactly once."""
        for layer, router in self._routers.items():
            router.set_capture_fn(self._before[layer])
        joined = {layer: torch.cat(parts) for layer, parts in self._chosen.items()}
        if not joined or any(len(ids_SK) != tokens for ids_SK in joined.values()):
            return b""
        found_SLK = torch.full(
            (
                tokens,
                layers,
                next(iter(joined.values())).shape[1],
            ),
            NO_EXPERT,
            dtype=torch.int32,
        )
        for layer, ids_SK in joined.items():
            found_SLK[:, layer] = ids_SK
        return found_SLK.numpy().tobytes()


class CachedChoices:
    """Experts of every token in the cache of a CPU engine, by cache slot.

    Requests with a cached prefix, in chunks, or resumed after an update find each token's latest
    choice there. On GPUs vLLM keeps them itself (`enable_return_routed_experts`), for its second
    model runner only.
    """

    def __init__(self, runner: Any, layers: int, experts: int) -> None:
        self._runner = runner
        self._layers = layers
        self._table = runner.input_batch.block_table[0]
        self._slots = runner.kv_cache_config.num_blocks * self._table.block_size
        self._dtype = torch.uint8 if experts <= ONE_BYTE else torch.int16
        self._kept_SLK: Tensor | None = None
        self._seen: dict[int, list[Tensor]] = {}
        for module in runner.model.modules():
            if isinstance(module, MoERunner) and isinstance(module.router, BaseRouter):
                module.router.set_capture_fn(partial(self._see, module.layer_id))
        self._execute = runner.execute_model
        runner.execute_model = self._watched

    def _see(self, layer: int, ids_SK: Tensor) -> None:
        self._seen.setdefault(layer, []).append(ids_SK.detach().to(self._dtype))

    def _watched(self, scheduler_output: Any, *arguments: Any, **named: Any) -> Any:
        self._seen.clear()
        result = self._execute(scheduler_output, *arguments, **named)
        tokens = scheduler_output.total_num_scheduled_tokens
        slots = torch.from_numpy(self._table.slot_mapping.np[:tokens]).long()
        for layer, parts in self._seen.items():
            ids_SK = torch.cat(parts)
            if self._kept_SLK is None:
                self._kept_SLK = torch.zeros(
                    self._slots, self._layers, ids_SK.shape[1], dtype=self._dtype
                )
            self._kept_SLK[slots, layer] = ids_SK[:tokens]
        return result

    def of(self, name: str, tokens: int) -> np.ndarray | None:
        """Return [S, L, K] of a request's first tokens; None if nothing was recorded."""
        place = self._runner.input_batch.req_id_to_index.get(name)
        if place is None or self._kept_SLK is None:
            return None
        positions = torch.arange(tokens)
        blocks = torch.from_numpy(self._table.block_table.np[place]).long()
        slots = blocks[positions // self._table.block_size] * self._table.block_size
        return self._kept_SLK[slots + positions % self._table.block_size].numpy()
