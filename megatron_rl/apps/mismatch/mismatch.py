"""`megatron-rl mismatch`: differences between a learner and an engine of one stored model at every
point of a forward pass (models/points.py), for those who add a family.

Two ways to look at a point, for each sequence:
- apart: each side has computed by itself, from the tokens on;
- own: the learner went on from the engine's values at every point before, so that only this one's
  arithmetic differs.

N response tokens, S positions, H any width, V tokens of the vocabulary.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import kl_div

from megatron_rl.apps.evaluation.adapters import is_peft
from megatron_rl.apps.evaluation.stored_model import StoredModel, served
from megatron_rl.batch import Batch, collate
from megatron_rl.config import ConfigError
from megatron_rl.config.schema import Config
from megatron_rl.learner.learner import Learner
from megatron_rl.models.model import Model
from megatron_rl.models.points import Kind, Point, points
from megatron_rl.sampler.engine_settings import EngineSettings
from megatron_rl.tracking.console import table
from megatron_rl.types import Prompt, SamplingParams, Scored

LOGPROB = Point(Kind.logprob)
HEAD = ("point", "apart: mean", "max", "own: mean", "max")
PROMPT_TOKENS = 8  # random ones
# a point's kind -> the modules, of the policy or of a layer, where its values pass
MODULES = {
    "embedding": "embedding",
    "input_norm": "input_layernorm",
    "qkv": "self_attention.linear_qkv",
    "head_norm": "self_attention.q_layernorm self_attention.k_layernorm",
    "rotary": "self_attention.core_attention self_attention.core_attention",
    "attention": "self_attention.core_attention",
    "o_proj": "self_attention.linear_proj",
    "post_norm": "pre_mlp_layernorm",
    "gate_up": "mlp.linear_fc1",
    "activation": "mlp.activation_func",
    "down": "mlp.linear_fc2",
    "experts": "mlp",
    "final_norm": "decoder.final_layernorm",
    "lm_head": "output_layer",
    "logprob": "",
}


@dataclass
class Difference:
    """Differences of the values of one point, over all sequences."""

    total: float = 0.0
    count: int = 0
    max: float = 0.0

    @property
    def mean(self) -> float:
        return self.total / self.count

    def add(self, learner: Tensor, engine: Tensor) -> None:
        sizes = (learner.double() - engine.double()).abs()
        self.total += float(sizes.sum())
        self.count += sizes.numel()
        self.max = max(self.max, float(sizes.max()))


class Port(NamedTuple):
    """A module of the learner where a point's values pass, or some of their columns."""

    point: Point
    module: torch.nn.Module
    columns: slice | Tensor
    argument: int | None  # of the module, where it is not its output


def ports(learner: Learner) -> Iterator[Port]:
    (policy,) = learner.modules
    shape = learner.shape
    sizes = [shape.size(part) for part in ("q", "kv", "kv")]
    parts = torch.arange(sum(sizes)).split(sizes)
    # megatron-core has queries, keys and values group by group
    by_group = torch.cat([part.view(shape.kv_heads, -1) for part in parts], 1).flatten()
    columns = {Kind.qkv: (by_group,), Kind.head_norm: parts, Kind.rotary: parts}
    for point in points(shape):
        root = policy if point.layer is None else policy.decoder.layers[point.layer]
        for number, name in enumerate(MODULES[point.kind].split()):
            place = columns.get(point.kind, (slice(None),))[number]
            argument = number if point.kind is Kind.rotary else None
            yield Port(point, root.get_submodule(name), place, argument)


class Comparison:
    """Forward passes of a learner of one rank beside those of an engine."""

    def __init__(self, learner: Learner) -> None:
        self.learner = learner
        self.ports = list(ports(learner))
        self.apart = {point: Difference() for point in points(learner.shape)}
        self.own = {point: Difference() for point in self.apart}
        self.kl = 0.0  # KL(engine, learner) at temperature 1 of both as they are, over all tokens

    def add(self, batch: Batch, values: Mapping[str, Tensor]) -> None:
        """`batch`: one row; `values`: the engine's, of all its tokens."""
        first = int(batch.prompt_lengths_B[0]) - 1
        engine_N = values[Kind.logprob][first:, 0]
        # the learner makes logits for the response alone
        values = {**values, Kind.lm_head: values[Kind.lm_head][first:][: len(engine_N)]}
        for differences in (self.apart, self.own):
            logprobs_N = self._pass(batch, values, differences)[: len(engine_N)]
            differences[LOGPROB].add(logprobs_N, engine_N)

    def _pass(
        self, batch: Batch, values: Mapping[str, Tensor], differences: dict[Point, Difference]
    ) -> Tensor:
        (policy,) = self.learner.modules
        policy.holds_logits = True
        with ExitStack() as hooks:
            hooks.callback(setattr, policy, "holds_logits", False)
            for port in self.ports:
                look = partial(self._look, port, values[str(port.point)], differences)
                passed = partial(_passed, look, port.argument or 0)
                if port.argument is None:
                    hook = port.module.register_forward_hook(passed)
                else:
                    hook = port.module.register_forward_pre_hook(passed)
                hooks.enter_context(hook)
            return self.learner.logprobs(batch)

    def _look(
        self, port: Port, engine_SH: Tensor, differences: dict[Point, Difference], passing: Tensor
    ) -> Tensor:
        """The values that go on: the engine's, when what is compared is this point's own."""
        engine_SH = engine_SH[:, port.columns]
        rows = passing.flatten(1)
        place = tuple(map(slice, engine_SH.shape))  # the rest is filler
        differences[port.point].add(rows[place], engine_SH)
        if differences is self.own:
            rows = rows.clone()
            rows[place] = engine_SH.to(rows.dtype)
            return rows.view(passing.shape)
        if port.point.kind is Kind.lm_head:
            ours_NV, theirs_NV = (
                logits_NV.double().log_softmax(1) for logits_NV in (rows[place], engine_SH)
            )
            self.kl += float(kl_div(ours_NV, theirs_NV, reduction="sum", log_target=True))
        return passing


def _passed(look: Callable[[Tensor], Tensor], place: int, module: Any, *passing: Any) -> Any:
    """A module's arguments or its output (the last of `passing`), after a look at what they hold
    at this place.
    """
    held = passing[-1]
    if isinstance(held, tuple):  # beside an output: a bias
        return (*held[:place], look(held[place]), *held[place + 1 :])
    return look(held)


def measure(config: Config, stored: StoredModel, count: int, tokens: int) -> str:
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
    with served(config, stored) as sampler:
        learner = Learner(model, whole)
        for weights in dict.fromkeys((stored.base, stored.weights)):
            learner.load_hf(weights)
        compared = Comparison(learner)
        for rollout in sampler.generate(prompts, params, seed=0):
            values = sampler.activations([*rollout.prompt.token_ids, *rollout.token_ids])
            compared.add(collate([Scored(rollout, reward=0.0)]), values)
    return "\n".join(_described(compared))


def _described(compared: Comparison) -> Iterator[str]:
    rows = []
    for point, apart in compared.apart.items():
        own = compared.own[point]
        sizes = (apart.mean, apart.max, own.mean, own.max)
        rows.append((str(point), *map("{:.2e}".format, sizes)))
    yield from table(HEAD, rows)
    logprobs = compared.apart[LOGPROB]
    yield (
        f"KL(sampler, learner) {compared.kl / logprobs.count:.3g} nats a token; mean |d| of "
        f"logprobs {logprobs.mean:.2g}, over {logprobs.count} tokens"
    )
