"""Hooks on a learner on a CPU that pair its values with an engine's at each point of a forward pass
(models/points.py), and can put the engine's in their place.

Where the pass goes on from the engine's values, whatever differs at a point was computed from the
engine's own inputs. Each rank looks at its own layers, columns and positions. megatron-core keeps
queries, keys and values interleaved by group: a port says which columns of a point's values pass
here, in which order.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_rl.learner.modules.packing import Pack
from megatron_rl.learner.policy import Policy
from megatron_rl.models.mapping import find
from megatron_rl.models.points import Kind, Pair, Point


@dataclass(frozen=True, eq=False)
class Port:
    point: Point
    module: torch.nn.Module
    columns: Tensor  # of the point's values, in the order in which they pass here
    rows_split: bool = False  # over the tensor-parallel ranks
    argument: int | None = None  # of the module, where it is not its output


class _Ports:
    def __init__(self, learner: Policy) -> None:
        self.learner = learner
        self.shape = learner.shape
        self.layout = learner.layout
        self.place = learner.place
        if self.shape.kv_heads % self.layout.tp:
            raise ValueError(
                f"learner.tensor_parallel: {self.layout.tp} ranks do not share "
                f"{self.shape.kv_heads} key/value heads evenly, so that their values cannot be "
                "compared with the engine's; use fewer"
            )

    def all(self) -> Iterator[Port]:
        for first, policy in self.learner.numbered_modules:
            if policy.pre_process:
                yield self._hidden(Point(Kind.embedding), policy.embedding)
            for layer, block in enumerate(policy.decoder.layers, first):
                yield from self._layer(layer, block)
            if policy.decoder.final_layernorm is not None:
                yield self._hidden(Point(Kind.final_norm), policy.decoder.final_layernorm)
            if policy.post_process:
                yield Port(
                    Point(Kind.lm_head), policy.output_layer, self._of_param("output_layer.weight")
                )

    def _layer(self, layer: int, block: Any) -> Iterator[Port]:
        def port(
            kind: Kind, module: torch.nn.Module, columns: Tensor, argument: int | None = None
        ) -> Port:
            return Port(Point(kind, layer), module, columns, argument=argument)

        def hidden(kind: Kind, module: torch.nn.Module) -> Port:
            return self._hidden(Point(kind, layer), module)

        attention = block.self_attention
        mlp = block.mlp
        name = f"decoder.layers.{layer}"
        query = self._share(0, self.shape.size("q"))
        key = self._share(self.shape.size("q"), self.shape.size("kv"))
        yield hidden(Kind.input_norm, block.input_layernorm)
        yield port(
            Kind.qkv,
            attention.linear_qkv,
            self._of_param(f"{name}.self_attention.linear_qkv.weight"),
        )
        if self.shape.has("qk_norm"):
            yield port(Kind.head_norm, attention.q_layernorm, query)
            yield port(Kind.head_norm, attention.k_layernorm, key)
        yield port(Kind.rotary, attention.core_attention, query, argument=0)
        yield port(Kind.rotary, attention.core_attention, key, argument=1)
        yield port(Kind.attention, attention.core_attention, query)
        yield hidden(Kind.o_proj, attention.linear_proj)
        yield hidden(Kind.post_norm, block.pre_mlp_layernorm)
        if not self.shape.has("dense_mlp", layer):
            yield hidden(Kind.experts, mlp)
            return
        yield port(Kind.gate_up, mlp.linear_fc1, self._of_param(f"{name}.mlp.linear_fc1.weight"))
        yield port(Kind.activation, mlp.activation_func, self._share(0, self.shape.ffn))
        yield hidden(Kind.down, mlp.linear_fc2)

    def _hidden(self, point: Point, module: torch.nn.Module) -> Port:
        return Port(
            point,
            module,
            torch.arange(self.shape.hidden),
            rows_split=self.learner.positions_shard is not None,
        )

    def _share(self, start: int, size: int) -> Tensor:
        """This rank's share of columns that are cut evenly."""
        here = size // self.layout.tp
        return torch.arange(start + self.place.tp * here, start + (self.place.tp + 1) * here)

    def _of_param(self, name: str) -> Tensor:
        """The outputs of a matrix, in the order in which its rows lie on this rank."""
        here = []
        start = 0
        for piece in find(name, self.shape).slices(self.shape, self.layout, self.place):
            here += [(span.local, start + span.full, span.length) for span in piece.spans]
            start += piece.shape[0]
        nothing = torch.zeros(0, dtype=torch.int64)
        return torch.cat(
            [nothing, *(torch.arange(full, full + length) for _, full, length in sorted(here))]
        )


@dataclass
class _Pass:
    values: Mapping[str, Tensor]  # the engine's
    replace: bool
    rank: int  # of the tensor-parallel group
    seen: dict[Point, list[Pair]] = field(default_factory=dict)
    pack: Pack | None = None  # that is passing

    def begin(self, policy: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self.pack = kwargs["pack"]

    def look(self, port: Port, passing: Tensor) -> Tensor | None:
        """Note the values that pass at a port; the values that go on in their place, where
        `replace` is asked for.
        """
        assert self.pack is not None
        if not self.pack.rows:  # an empty micro-batch
            return None
        engine = self.values[str(port.point)]
        rows = passing.flatten(1)
        # of which a learner computes those that predict the response
        if port.point.kind is Kind.lm_head:
            engine = engine[self.pack.logit_index_N]
        start = self.rank * len(rows) if port.rows_split else 0
        engine = engine[start : start + len(rows)][:, port.columns]
        place = slice(len(engine)), slice(len(port.columns))  # the rest is filler
        self.seen.setdefault(port.point, []).append(Pair(rows[place].clone(), engine, port.columns))
        if not self.replace:
            return None
        rows = rows.clone()
        rows[place] = engine.to(rows.dtype)
        return rows.view(passing.shape)


class Activations:
    """A learner on a host, whose modules are looked at while it computes."""

    def __init__(self, learner: Policy) -> None:
        if learner.device.type != "cpu":
            raise ValueError(
                "the learner's modules are compared with the engine's on hosts only so far"
            )
        self._learner = learner
        self._ports = list(_Ports(learner).all())
        # the engine's values, in the form in which the port's module puts them out
        self._kept: dict[Port, Any] = {}
        self._hooks: list[Any] = []
        self._stilled: list[Any] = []

    @contextmanager
    def beside(
        self, values: Mapping[str, Tensor], replace: bool = False, only: Point | None = None
    ) -> Iterator[dict[Point, list[Pair]]]:
        """Yields what forward passes fill: pairs of values of the one sequence passed, ours and the
        engine's `values`.

        `replace`: the pass goes on from them, at each point.
        """
        one = _Pass(values, replace, self._learner.place.tp)
        hooks = [
            policy.register_forward_pre_hook(one.begin, with_kwargs=True)
            for policy in self._learner.modules
        ]
        try:
            self._hold_logits(True)
            hooks += [self._watch(port, one) for port in self._ports if only in (None, port.point)]
            yield one.seen
        finally:
            self._hold_logits(bool(self._stilled))
            for hook in hooks:
                hook.remove()

    def hold(self, point: Point) -> None:
        """Fix this point at the engine's values of the last replacing pass until `release`: a
        module that has them as outputs computes nothing.
        """
        self._hold_logits(True)
        for port in self._ports:
            if port.point != point:
                continue
            kept = self._kept[port]
            if port.argument is not None:
                self._hooks.append(
                    port.module.register_forward_pre_hook(
                        partial(_with_argument, port.argument, kept)
                    )
                )
            else:
                port.module.forward = lambda *_, _kept=kept, **__: _kept
                self._stilled.append(port.module)

    def release(self) -> None:
        for hook in self._hooks:
            hook.remove()
        for module in self._stilled:
            del module.forward
        self._hooks = []
        self._stilled = []
        self._hold_logits(False)

    def _hold_logits(self, whole: bool) -> None:
        for policy in self._learner.modules:
            policy.holds_logits = whole

    def _watch(self, port: Port, one: _Pass) -> Any:
        def before(module: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
            assert port.argument is not None
            put = one.look(port, args[port.argument])
            if put is None:
                return None
            self._kept[port] = put
            return _with_argument(port.argument, put, module, args)

        def after(module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            put = one.look(port, output[0] if isinstance(output, tuple) else output)
            if put is None:
                return None
            self._kept[port] = (put, *output[1:]) if isinstance(output, tuple) else put
            return self._kept[port]

        if port.argument is None:
            return port.module.register_forward_hook(after)
        return port.module.register_forward_pre_hook(before)


def _with_argument(
    place: int, value: Tensor, module: torch.nn.Module, args: tuple[Any, ...]
) -> tuple[Any, ...]:
    return (*args[:place], value, *args[place + 1 :])
