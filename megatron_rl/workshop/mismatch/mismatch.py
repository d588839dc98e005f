"""`megatron-rl mismatch`: differences between a learner and an engine of one stored model at every
point of a forward pass (models/points.py), for those who add a family.

Two ways to look at a point, for each sequence:
- apart: each side has computed by itself, from the tokens on;
- own: the learner went on from the engine's values at every point before, so that only this one's
  arithmetic differs.

N response tokens, S positions, H any width, V tokens of the vocabulary.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_rl.batch import Batch, collate
from megatron_rl.config import ConfigError
from megatron_rl.config.schema import Config
from megatron_rl.learner.learner import Learner
from megatron_rl.models.layout import Layout, Place
from megatron_rl.models.mapping import find
from megatron_rl.models.model import Model
from megatron_rl.models.points import Kind, Point, points
from megatron_rl.models.shape import ModelShape
from megatron_rl.runs.console import table
from megatron_rl.sampler.engine_settings import EngineSettings
from megatron_rl.types import Prompt, SamplingParams, Scored
from megatron_rl.workshop.evaluation.adapters import is_peft
from megatron_rl.workshop.evaluation.stored_model import StoredModel, served

LOGPROB = Point(Kind.logprob)
HEAD = ("point", "apart: mean", "max", "own: mean", "max")
PROMPT_TOKENS = 8  # random ones
ALL = slice(None)


@dataclass
class Difference:
    """Differences of the values of one point, over all sequences."""

    total: float = 0.0
    count: int = 0
    max: float = 0.0

    @property
    def mean(self) -> float:
        return self.total / max(1, self.count)

    def add(self, learner: Tensor, engine: Tensor) -> None:
        sizes = (learner.double() - engine.double()).abs()
        self.total += float(sizes.sum())
        self.count += sizes.numel()
        self.max = max(self.max, float(sizes.max()))


class Port(NamedTuple):
    """A module of the learner where a point's values pass, or some of their columns."""

    point: Point
    module: torch.nn.Module
    columns: slice | Tensor = ALL
    argument: int | None = None  # of the module, where it is not its output


def ports(learner: Learner) -> Iterator[Port]:
    (policy,) = learner.modules
    yield Port(Point(Kind.embedding), policy.embedding)
    for layer, block in enumerate(policy.decoder.layers):
        yield from _of_layer(learner.shape, layer, block)
    yield Port(Point(Kind.final_norm), policy.decoder.final_layernorm)
    yield Port(Point(Kind.lm_head), policy.output_layer)


def _of_layer(shape: ModelShape, layer: int, block: Any) -> Iterator[Port]:
    def port(
        kind: Kind,
        module: torch.nn.Module,
        columns: slice | Tensor = ALL,
        argument: int | None = None,
    ) -> Port:
        return Port(Point(kind, layer), module, columns, argument)

    attention = block.self_attention
    query = slice(0, shape.size("q"))
    key = slice(shape.size("q"), shape.size("q") + shape.size("kv"))
    yield port(Kind.input_norm, block.input_layernorm)
    yield port(Kind.qkv, attention.linear_qkv, _interleaved(shape, layer))
    if shape.has("qk_norm"):
        yield port(Kind.head_norm, attention.q_layernorm, query)
        yield port(Kind.head_norm, attention.k_layernorm, key)
    yield port(Kind.rotary, attention.core_attention, query, argument=0)
    yield port(Kind.rotary, attention.core_attention, key, argument=1)
    yield port(Kind.attention, attention.core_attention)
    yield port(Kind.o_proj, attention.linear_proj)
    yield port(Kind.post_norm, block.pre_mlp_layernorm)
    if shape.has("dense_mlp", layer):
        yield port(Kind.gate_up, block.mlp.linear_fc1)
        yield port(Kind.activation, block.mlp.activation_func)
        yield port(Kind.down, block.mlp.linear_fc2)
    else:
        yield port(Kind.experts, block.mlp)


def _interleaved(shape: ModelShape, layer: int) -> Tensor:
    """Queries, keys and values in megatron-core's order: group by group."""
    param = find(f"decoder.layers.{layer}.self_attention.linear_qkv.weight", shape)
    spans = []
    start = 0
    for piece in param.slices(shape, Layout(), Place()):
        spans += [(span.local, start + span.full, span.length) for span in piece.spans]
        start += piece.shape[0]
    return torch.cat([torch.arange(full, full + length) for _, full, length in sorted(spans)])


class Comparison:
    """Forward passes of a learner of one rank beside those of an engine."""

    def __init__(self, learner: Learner) -> None:
        self.learner = learner
        self.ports = list(ports(learner))
        self.apart = {point: Difference() for point in points(learner.shape)}
        self.own = {point: Difference() for point in self.apart}
        self.tokens = 0
        self.kl = 0.0  # of the two as they are, summed over tokens
        self._logits_N = torch.zeros(0)  # rows of the pack that passes, whose logits are made

    def add(self, batch: Batch, values: Mapping[str, Tensor]) -> None:
        """`batch`: one row; `values`: the engine's, of all its tokens."""
        engine_N = values[str(LOGPROB)][int(batch.prompt_lengths_B[0]) - 1 :, 0]
        self.tokens += len(engine_N)
        for differences in (self.apart, self.own):
            logprobs_N = self._pass(batch, values, differences)[: len(engine_N)]
            differences[LOGPROB].add(logprobs_N, engine_N)

    def _pass(
        self, batch: Batch, values: Mapping[str, Tensor], differences: dict[Point, Difference]
    ) -> Tensor:
        (policy,) = self.learner.modules
        hooks = [policy.register_forward_pre_hook(self._begin, with_kwargs=True)]
        policy.holds_logits = True
        for port in self.ports:
            look = partial(self._look, port, values[str(port.point)], differences)
            if port.argument is None:
                hooks.append(port.module.register_forward_hook(partial(_after, look)))
            else:
                before = partial(_before, look, port.argument)
                hooks.append(port.module.register_forward_pre_hook(before))
        try:
            return self.learner.logprobs(batch)
        finally:
            policy.holds_logits = False
            for hook in hooks:
                hook.remove()

    def _begin(self, policy: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self._logits_N = kwargs["pack"].logit_index_N

    def _look(
        self, port: Port, engine_SH: Tensor, differences: dict[Point, Difference], passing: Tensor
    ) -> Tensor:
        """The values that go on: the engine's, when what is compared is this point's own."""
        if port.point.kind is Kind.lm_head:
            engine_SH = engine_SH[self._logits_N]
        engine_SH = engine_SH[:, port.columns]
        rows = passing.flatten(1)
        place = (slice(len(engine_SH)), slice(engine_SH.shape[1]))  # the rest is filler
        differences[port.point].add(rows[place], engine_SH)
        if differences is self.own:
            rows = rows.clone()
            rows[place] = engine_SH.to(rows.dtype)
            return rows.view(passing.shape)
        if port.point.kind is Kind.lm_head:
            self.kl += _kl(rows[place], engine_SH)
        return passing


def _before(
    look: Callable[[Tensor], Tensor], place: int, module: Any, args: tuple[Any, ...]
) -> tuple[Any, ...]:
    return (*args[:place], look(args[place]), *args[place + 1 :])


def _after(look: Callable[[Tensor], Tensor], module: Any, args: Any, output: Any) -> Any:
    if isinstance(output, tuple):  # beside it: a bias
        return (look(output[0]), *output[1:])
    return look(output)


def _kl(learner_NV: Tensor, engine_NV: Tensor) -> float:
    """KL(engine, learner) at temperature 1, summed over positions."""
    ours_NV = learner_NV.double().log_softmax(1)
    theirs_NV = engine_NV.double().log_softmax(1)
    return float((theirs_NV.exp() * (theirs_NV - ours_NV)).sum())


def measure(
    config: Config, stored: StoredModel, count: int, tokens: int, note: Callable[[str], None]
) -> str:
    """Table over the engine's responses to `count` random prompts, of `tokens` at most each."""
    if is_peft(stored.weights):
        raise ConfigError(f"{stored.weights}: name the run, or merge PEFT's adapters by an export")
    model = Model.read(stored.folder, config.learner, config.model.head_precision)
    if stored.base != stored.weights:
        model = replace(model, shape=replace(model.shape, lora=stored.lora))
    # the temperature at which an engine says what a prompt was worth
    whole = replace(config, rollout=replace(config.rollout, temperature=1.0))
    # to which the engine adds a token
    room = min(tokens, EngineSettings.from_config(config).max_tokens - 1)
    size = (count, min(PROMPT_TOKENS, room // 2))
    ids = torch.randint(model.shape.vocab, size, generator=torch.Generator().manual_seed(0))
    prompts = [Prompt(number, tuple(row), "", {}) for number, row in enumerate(ids.tolist())]
    params = SamplingParams(1, room - size[1])
    with served(config, stored, note) as sampler:
        learner = Learner(model, whole)
        for weights in dict.fromkeys((stored.base, stored.weights)):
            learner.load_hf(weights)
        compared = Comparison(learner)
        for rollout in sampler.generate(prompts, params, seed=0, first_group=0, step=0):
            values = sampler.activations([*rollout.prompt.token_ids, *rollout.token_ids])
            compared.add(collate([Scored(rollout, reward=0.0)]), values)
    return "\n".join(_described(compared))


def _described(compared: Comparison) -> Iterator[str]:
    rows = []
    for point, apart in compared.apart.items():
        own = compared.own[point]
        sizes = (apart.mean, apart.max, own.mean, own.max)
        rows.append((str(point), *(f"{size:.2e}" for size in sizes)))
    yield from table(HEAD, rows)
    yield (
        f"KL(sampler, learner) {compared.kl / compared.tokens:.3g} nats a token; mean |d| of "
        f"logprobs {compared.apart[LOGPROB].mean:.2g}, over {compared.tokens} tokens"
    )
