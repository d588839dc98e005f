"""`megatron-rl rerun-step`: repeats a non-finite update from its dump; finds the first bad value.

Searches in the order of the computation: weights, minibatch, outputs of modules, loss, gradients
from the last module to the first.

S positions of a pack, N response tokens of a pack.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from megatron_rl.batch import Targets
from megatron_rl.checkpoint.torch_dist.reader import Reader
from megatron_rl.config import ConfigError, recorded_config
from megatron_rl.config.schema import Config, Device, KvCache, OnNonFinite, SamplerSection
from megatron_rl.learner import state
from megatron_rl.learner.learner import Learner
from megatron_rl.learner.modules.packing import Pack
from megatron_rl.learner.nonfinite import CONFIG, POLICY, read_minibatch
from megatron_rl.models.layout import Layout
from megatron_rl.models.model import Model
from megatron_rl.train import load_policy

# of a layout: one rank has none of them
PARALLEL = (
    "virtual_pipeline_model_parallel_size",
    "expert_tensor_parallel_size",
    "sequence_parallel",
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
)
VALUES = ("advantages_B", "weights_N", "anchor_logprobs_N", "ref_logprobs_N")  # of a minibatch


def rerun(dump: Path) -> str:
    """A minibatch of a dump, or the first of a dump's folder."""
    path = min(dump.glob("minibatch_*.safetensors"), default=dump)
    try:
        (batch, targets), random, about = read_minibatch(path)
        layout = Layout(**about["layout"])
    except (OSError, ValueError, TypeError, LookupError, SafetensorError) as error:
        raise ConfigError(f"{path}: no minibatch of a dump ({error})") from None
    config = _one_rank(recorded_config(path.parent / CONFIG))
    model = Model.read(config.model.folder, config.learner, config.model.head_precision)
    learner = Learner(model, config)
    if model.shape.lora is not None:
        # what the adapters change
        load_policy(learner, config.model, config.run.seed, reference=False)
    state.LearnerState(learner).restore(Reader(path.parent / POLICY), steps=0)
    if random and layout == learner.layout:
        learner.restore_random(random)
    found = [
        f"the weight {name} holds {_odd(parameter)}"
        for name, parameter in learner.named_parameters()
        if not parameter.isfinite().all()
    ]
    found += _values(targets)
    look = _Look(learner, targets)
    metrics = learner.update(learner.part(batch), targets)
    found += look.found
    found += _gradients(learner)
    recorded = about["metrics"]
    rows = [
        ("dump", f"{path}: after {about['steps']} optimizer steps, {len(batch)} rows"),
        ("then", _numbers(recorded) + ("" if layout == learner.layout else ", on other ranks")),
        ("now", _numbers(metrics)),
        *(("first:" if not number else "after it:", text) for number, text in enumerate(found)),
    ]
    return "\n".join(f"{name:<9} {text}" for name, text in rows)


def _numbers(metrics: Mapping[str, float]) -> str:
    return f"loss {metrics.get('loss/total')}, gradient norm {metrics['optim/grad_norm']}"


def _one_rank(config: Config) -> Config:
    learner = config.learner
    kinds = ("tensor", "pipeline", "expert", "data", "context")
    alone: dict[str, Any] = {f"{kind}_parallel": 1 for kind in kinds}
    megatron = {name: value for name, value in learner.megatron.items() if name not in PARALLEL}
    return replace(
        config,
        run=replace(config.run, device=Device.auto),  # a dump may have come from another machine
        learner=replace(learner, **alone, on_nonfinite=OnNonFinite.skip, megatron=megatron),
        # measured for the sampler
        quantization=replace(config.quantization, smoothing=None, kv_cache=KvCache.none),
        sampler=SamplerSection(),
    )


def _values(targets: Targets) -> Iterator[str]:
    used_N = targets.denominator_mask_N
    for name in VALUES:
        values = getattr(targets, name)
        if values is None:
            continue
        used = used_N if name.endswith("_N") else targets.responses.count(used_N) > 0
        for at in (~values.isfinite() & used).nonzero().flatten().tolist()[:1]:
            yield f"{name} holds {float(values[at])} {_where(targets, name, at)}"


def _where(targets: Targets, name: str, at: int) -> str:
    if not name.endswith("_N"):
        return f"in row {at}"
    rows = targets.responses
    row = int(rows.at_tokens(torch.arange(rows.units))[at])
    return f"at response token {int(rows.place_N[at])} of row {row}"


def _gradients(learner: Learner) -> Iterator[str]:
    """The last in the order of the model is the first in the order of the backward pass."""
    held: dict[str, Tensor] = {
        name: vars(parameter)["main_grad"]
        for name, parameter in learner.named_parameters()
        if parameter.requires_grad
    }
    odd = [name for name, gradient in held.items() if not bool(gradient.isfinite().all())]
    if odd:
        yield f"the gradients of {len(odd)} of {len(held)} weights, on the way back first {odd[-1]}"
    else:
        largest, name = max((float(one.abs().max()), name) for name, one in held.items())
        yield f"no weight's gradient; the largest value is {largest:.4g}, of {name}"


class _Look:
    """First non-finite output of the forward pass and gradient of the backward pass."""

    def __init__(self, learner: Learner, targets: Targets) -> None:
        self._targets = targets
        self._pack: Pack | None = None
        self._forward: str | None = None
        self._backward: str | None = None
        for policy in learner.modules:
            policy.register_forward_pre_hook(self._begin, with_kwargs=True)
            for name, module in policy.named_modules():
                if name:
                    module.register_forward_pre_hook(partial(self._before, name))
                    module.register_forward_hook(partial(self._after, name))

    @property
    def found(self) -> list[str]:
        return [each for each in (self._forward, self._backward) if each is not None]

    def _begin(self, module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self._pack = kwargs.get("pack", args[0] if args else None)

    def _before(self, name: str, module: torch.nn.Module, args: Any) -> None:
        """Check the input, in which a sum or the like between two modules shows."""
        self._check(args, f"the input of {name}")

    def _after(self, name: str, module: torch.nn.Module, args: Any, output: Any) -> None:
        self._check(output, f"the output of {name}")
        for tensor in _activations(output):
            tensor.register_hook(partial(self._gradient, name, self._pack))

    def _check(self, values: Any, what: str) -> None:
        for tensor in _activations(values) if self._forward is None else ():
            if not bool(tensor.isfinite().all()):
                self._forward = f"{what} holds {_odd(tensor)}{self._place(tensor, self._pack)}"
                return

    def _gradient(self, name: str, pack: Pack | None, gradient: Tensor) -> None:
        if self._backward is None and not bool(gradient.isfinite().all()):
            self._backward = f"the gradient of the output of {name} holds {_odd(gradient)}{self._place(gradient, pack)}"

    def _place(self, tensor: Tensor, pack: Pack | None) -> str:
        """Row, and token in that row, of the first odd value."""
        if pack is None:
            return ""
        first = (~tensor.isfinite()).nonzero()[0].tolist()
        for at, size in zip(first, tensor.shape, strict=True):
            if size == len(pack.logit_index_N):
                at = int(pack.logit_index_N[at])
            elif size != len(pack.tokens_S):
                continue
            sequence = int(torch.searchsorted(pack.starts, at, right=True)) - 1
            row = pack.rows[sequence]
            token = at - int(pack.starts[sequence])
            length = int(self._targets.prompt_lengths_B[row])
            if token < length:
                return f", first at row {row}, token {token} of the prompt"
            return f", first at row {row}, token {token - length} of the response"
        return ""


def _activations(values: Any) -> Iterator[Tensor]:
    """Those that gradients flow through: masks may well hold infinities."""
    for value in values if isinstance(values, (tuple, list)) else (values,):
        if isinstance(value, Tensor) and value.requires_grad:
            yield value


def _odd(tensor: Tensor) -> str:
    odd = tensor.detach()[~tensor.isfinite()]
    return f"{len(odd)} of {tensor.numel()} values that are no number ({float(odd[0])})"
