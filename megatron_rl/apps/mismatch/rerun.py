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

from megatron_rl.batch import UpdateInputs
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
    found += look.found.values()
    found += _gradients(learner)
    other = "" if layout == learner.layout else ", on other ranks"
    rows = [
        ("dump", f"{path}: after {about['steps']} optimizer steps, {len(batch)} rows"),
        ("then", _numbers(about["metrics"]) + other),
        ("now", _numbers(metrics)),
        *zip(["first:"] + ["after it:"] * len(found), found, strict=False),
    ]
    return "\n".join(f"{name:<9} {text}" for name, text in rows)


def _numbers(metrics: Mapping[str, float]) -> str:
    return f"loss {metrics.get('loss/total')}, gradient norm {metrics['optim/grad_norm']}"


def _one_rank(config: Config) -> Config:
    learner = config.learner
    return replace(
        config,
        run=replace(config.run, device=Device.auto),  # a dump may have come from another machine
        learner=replace(
            learner,
            tensor_parallel=1,
            pipeline_parallel=1,
            expert_parallel=1,
            data_parallel=1,
            context_parallel=1,
            on_nonfinite=OnNonFinite.skip,
            megatron={
                name: value for name, value in learner.megatron.items() if name not in PARALLEL
            },
        ),
        # measured for the sampler
        quantization=replace(config.quantization, smoothing=None, kv_cache=KvCache.none),
        sampler=SamplerSection(),
    )


def _values(targets: UpdateInputs) -> Iterator[str]:
    rows = targets.responses
    row_N = rows.at_tokens(torch.arange(rows.units))
    for name in VALUES:
        values = getattr(targets, name)
        if values is None:
            continue
        if name.endswith("_B"):
            values = rows.at_tokens(values)
        odd_N = ~values.isfinite() & targets.denominator_mask_N
        for (at,) in odd_N.nonzero().tolist()[:1]:
            where = f"{name} of response token {int(rows.place_N[at])}"
            yield f"{where} holds {float(values[at])} in row {int(row_N[at])}"


def _gradients(learner: Learner) -> Iterator[str]:
    """The last in the order of the model is the first in the order of the backward pass."""
    held: dict[str, Tensor] = {
        name: vars(parameter)["main_grad"]
        for name, parameter in learner.named_parameters()
        if parameter.requires_grad
    }
    odd = [name for name, gradient in held.items() if not gradient.isfinite().all()]
    if odd:
        yield f"the gradients of {len(odd)} of {len(held)} weights, on the way back first {odd[-1]}"
    else:
        largest, name = max((float(one.abs().max()), name) for name, one in held.items())
        yield f"no weight's gradient; the largest value is {largest:.4g}, of {name}"


class _Look:
    """First non-finite output of the forward pass and gradient of the backward pass."""

    def __init__(self, learner: Learner, targets: UpdateInputs) -> None:
        self.found: dict[str, str] = {}  # by the pass
        self._targets = targets
        for policy in learner.modules:
            policy.register_forward_pre_hook(self._begin, with_kwargs=True)
            for name, module in policy.named_modules():
                if not name:  # the whole model: its last module says it
                    continue
                module.register_forward_hook(partial(self._after, name))

    def _begin(self, module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self._pack: Pack = kwargs["pack"]

    def _after(self, name: str, module: torch.nn.Module, args: Any, output: Any) -> None:
        """Check the input too, in which a sum or the like between two modules shows."""
        for tensor in _activations(args):
            self._check("forward", f"input of {name}", self._pack, tensor)
        what = f"output of {name}"
        for tensor in _activations(output):
            self._check("forward", what, self._pack, tensor)
            check = partial(self._check, "backward", f"gradient of the {what}", self._pack)
            tensor.register_hook(check)

    def _check(self, way: str, what: str, pack: Pack, tensor: Tensor) -> None:
        if way not in self.found and not tensor.isfinite().all():
            self.found[way] = f"the {what} holds {_odd(tensor)}{self._place(tensor, pack)}"

    def _place(self, tensor: Tensor, pack: Pack) -> str:
        """Row, and token in that row, of the first odd value."""
        first = (~tensor.isfinite()).nonzero()[0]
        for at, size in zip(first.tolist(), tensor.shape, strict=True):
            if size == len(pack.logit_index_N):
                at = int(pack.logit_index_N[at])
            elif size != len(pack.tokens_S):
                continue
            sequence = int(torch.searchsorted(pack.starts, at, right=True)) - 1
            row = pack.rows[sequence]
            token = at - int(pack.starts[sequence])
            prompt = int(self._targets.prompt_lengths_B[row])
            return f", first at row {row}, token {token} (its prompt has {prompt})"
        return ""


def _activations(values: Any) -> Iterator[Tensor]:
    """Those that gradients flow through: masks may well hold infinities."""
    for value in values if isinstance(values, (tuple, list)) else (values,):
        if isinstance(value, Tensor) and value.requires_grad:
            yield value


def _odd(tensor: Tensor) -> str:
    odd = tensor.detach()[~tensor.isfinite()]
    return f"{len(odd)} of {tensor.numel()} values that are no number ({float(odd[0])})"
