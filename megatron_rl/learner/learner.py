"""The learner: a policy under megatron-core that gives logprobs and takes optimizer steps.

Every rank calls the same methods with the same global batch and gets the same results back.
One convention for the loss: it is divided by counts over the whole minibatch, known before the step,
so micro-batches, packs and data-parallel ranks add up and nothing is averaged anywhere.

B rows of the batch, T response positions, N response tokens of a pack, V columns of the vocabulary share.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_rl.learner.parallel import LearnerRank, leave  # patches the host before megatron is imported

from megatron.core import parallel_state  # isort: skip
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads  # isort: skip
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module

from megatron_rl.config.fleet import replica_formats
from megatron_rl.config.patience import collective_s
from megatron_rl.config.schema import (
    CorrectionConfig,
    Format,
    Forward,
    KvCache,
    LearnerSection,
    LossConfig,
    OptimSection,
    Precision,
    QuantizationSection,
    RolloutSection,
    RunSection,
    SamplerSection,
    Sleep,
)
from megatron_rl.distributed import exchange
from megatron_rl.learner import host, limits, weights
from megatron_rl.learner.activation_stats import ActivationStats
from megatron_rl.learner.as_sampler import Arithmetic, AsSampler
from megatron_rl.learner.cache_stats import CacheStats
from megatron_rl.learner.forward_clock import ForwardClock
from megatron_rl.learner.kept_logprobs import kept_logprobs_and_entropy, truncation
from megatron_rl.learner.logprobs import VocabShare, logprobs_alone, logprobs_and_entropy
from megatron_rl.learner.minibatch import loss_inputs
from megatron_rl.learner.model import PolicyModel, build, transformer_config
from megatron_rl.learner.nonfinite import NonFiniteUpdates
from megatron_rl.learner.operations import attention_share
from megatron_rl.learner.optimizer import clip, optimizer_config, replicas_config
from megatron_rl.learner.packing import Pack, assign_rows, pack
from megatron_rl.learner.rounding import rounded_again
from megatron_rl.learner.schedule import learning_rate
from megatron_rl.loss.policy_loss import Totals, count_totals, policy_loss, seen_tokens
from megatron_rl.models.hf_folder import HfFolder
from megatron_rl.models.mapping import global_name
from megatron_rl.models.model import Model
from megatron_rl.models.weight_files import is_checkpoint
from megatron_rl.processes.pulse import mark
from megatron_rl.quantization.host_products import has_fp8
from megatron_rl.quantization.smoothing import Smoothing
from megatron_rl.rollout_correction.metrics import KEPT_LOG_MASS, OUTSIDE_SUPPORT
from megatron_rl.types import Batch, OwnPass, Targets

MIRRORED = ({Format.int8}, {Format.fp8})  # formats of engines that it can compute as


class Learner:
    """One rank's part of the policy, its optimizer, and the methods that all ranks call together."""

    def __init__(
        self,
        model: Model,
        *,
        run: RunSection,
        learner: LearnerSection,
        optim: OptimSection,
        loss: LossConfig,
        correction: CorrectionConfig,
        rollout: RolloutSection,
        quantization: QuantizationSection,
        sampler: SamplerSection = SamplerSection(),  # noqa: B008 - frozen
        dump_dir: Path | None = None,
        note: Callable[[str], None] = lambda line: None,
    ) -> None:
        """`sampler`: an engine on these devices may give its memory up, and ranks wait for what it answers."""
        host.require(run.device)
        self.model, self.shape, self.layout = model, model.shape, model.layout
        self.run, self.learner, self.optim, self.rollout = run, learner, optim, rollout
        self.loss, self.correction = loss, correction
        self.ranks = LearnerRank(learner, model.layout, run.seed, collective_s(run.patience_s, sampler))
        self.rank, self.world_size = self.ranks.rank, self.ranks.world_size
        self.is_driver, self.device = self.ranks.is_driver, self.ranks.device
        self.place, self.groups = self.ranks.place, self.ranks.groups
        self.engine_sleeps = sampler.sleep != Sleep.none
        self.steps = 0  # optimizer steps taken
        self._reference: list[Tensor] = []
        self.megatron_config = transformer_config(model, learner)
        self.nonfinite = NonFiniteUpdates(self, dump_dir, note)
        self.modules = [self._chunk(chunk) for chunk in range(self.layout.chunks)]
        self._activations = ActivationStats(self.shape, self.device)
        if quantization.smoothing:
            self._watch_activations()
        self._cache = CacheStats(self.shape, self.device)
        self._forward_clock = ForwardClock(self.device)
        self._own_pass: OwnPass | None = None
        if quantization.kv_cache != KvCache.none:
            for chunk, module in enumerate(self.modules):
                self._cache.watch(module, self._first_layer(chunk))
        self._as_sampler: AsSampler | None = None
        self._arithmetic = Arithmetic.plain
        self._engine_tp, self._formats = sampler.tensor_parallel, {*replica_formats(sampler, quantization)}
        if learner.forward is Forward.as_sampler and quantization.format != Format.none:
            self._as_sampler = self._computes_as(quantization)
            self._arithmetic = Arithmetic.sampler
        elif self._mirrors_engine and self._formats in MIRRORED:
            self._as_sampler = self._computes_as(quantization)
        self.chunks = [self._wrapped(module, chunk) for chunk, module in enumerate(self.modules)]
        settings = optimizer_config(optim, learner.precision, self.megatron_config.params_dtype)
        self.clip_grad = settings.clip_grad
        self.optimizer = get_megatron_optimizer(
            settings, self.chunks, use_gloo_process_groups=self.device.type != "cpu"
        )
        no_sync = [chunk.no_sync for chunk in self.chunks]
        self.megatron_config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
        self.megatron_config.finalize_model_grads_func = _finalize
        self.share = VocabShare.of(
            self.place.tp,
            self.layout.tp,
            self.shape.vocab,
            self.layout.padded_vocab(self.shape.vocab) // self.layout.tp,
            parallel_state.get_tensor_model_parallel_group(),
        )

    def _chunk(self, chunk: int) -> PolicyModel:
        """This rank's part of the pipeline: one stage, or one of several chunks in an interleaved one."""
        return build(
            self.model,
            self.megatron_config,
            first=self.ranks.first_stage and chunk == 0,
            last=self.ranks.last_stage and chunk == self.layout.chunks - 1,
            chunk=chunk if self.layout.vp is not None else None,
        )

    def _first_layer(self, chunk: int) -> int:
        """Its number in the whole model."""
        return self.layout.layers(self.shape.layers, self.place.pp, chunk).start

    def _watch_activations(self) -> None:
        shard = self.place.tp if self.megatron_config.sequence_parallel else None
        for chunk, module in enumerate(self.modules):
            first_layer = self._first_layer(chunk)
            self._activations.watch(module, first_layer, shard)

    @property
    def _mirrors_engine(self) -> bool:
        """Whether its layers round where the engine's BF16 layers do, or can be made to."""
        plain = self.device.type == "cpu" and self.learner.precision is Precision.bf16
        known = Format.fp8 not in self._formats or not has_fp8()
        return plain and known and self._engine_tp in (1, self.layout.tp)

    def _computes_as(self, quantization: QuantizationSection) -> AsSampler:
        if self.device.type != "cpu":
            raise ValueError("learner.forward=as_sampler is built for hosts so far; use bf16 here")
        if quantization.format == Format.fp8 and has_fp8():
            raise ValueError(
                "learner.forward=as_sampler with quantization.format=fp8: this processor multiplies FP8 itself, and "
                "vLLM leaves it to it; use bf16, or quantization=int8"
            )
        layers = AsSampler(self.model, self.groups, quantization.format, quantization.ignore, self._engine_tp)
        for chunk, module in enumerate(self.modules):
            layers.watch(module, self._first_layer(chunk))
        return layers

    def _wrapped(self, module: PolicyModel, chunk: int) -> DistributedDataParallel:
        inner = module.to(self.device)
        if self.learner.precision is Precision.bf16:
            inner = Float16Module(self.megatron_config, inner)
        sums = replicas_config(self.optim, self.layout.dp)
        return DistributedDataParallel(self.megatron_config, sums, inner, disable_bucketing=chunk > 0)

    # weights

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """This rank's shards, under names whose layer and expert numbers count over the whole model."""
        experts = self.shape.experts
        first_expert = self.layout.local_experts(experts, self.place.ep).start if experts else 0
        for chunk, module in enumerate(self.modules):
            first_layer = self._first_layer(chunk)
            for name, parameter in module.named_parameters():
                yield global_name(name, first_layer, first_expert), parameter

    def load_hf(self, path: Path | str) -> None:
        """Weights of a Hugging Face folder, or of a torch_dist checkpoint of any layout."""
        if is_checkpoint(Path(path)):
            from megatron_rl.checkpoint.torch_dist import (
                reader as torch_dist,  # with torch's own checkpoints: seconds that few runs need
            )

            get = torch_dist.getter(torch_dist.Reader(Path(path)), self.shape)
        else:
            get = HfFolder(path).get
        with torch.no_grad():
            self._load(get)

    def init_random(self, seed: int) -> None:
        """A random model: the same one for every layout."""
        self._load(weights.random_tensors(self.model, seed))

    def _load(self, get_hf: Callable[[str], Tensor]) -> None:
        weights.load(self.named_parameters(), self.model, self.place, get_hf)
        self.optimizer.reload_model_params()
        self.weights_changed()

    def weights_changed(self) -> None:
        if self._as_sampler is not None:
            self._as_sampler.stale()

    def smooths_as(self, smoothing: Smoothing | None) -> None:
        """What the sampler's weights are smoothed with, wherever the forward pass is the sampler's."""
        if self._as_sampler is not None:
            self._as_sampler.follow(smoothing)

    # the forward pass

    def logprobs(self, batch: Batch) -> Tensor:
        """Logprob of every response token at rollout.temperature, [B, T] float32, 0 beyond a response."""
        with self._activations.observing():
            return self._logprobs(batch)

    def take_activation_amax(self) -> Tensor:
        """[layer, norm, channel]: largest output of each norm that this rank saw in `logprobs` since the last call.

        Kept only with quantization.smoothing.
        """
        return self._activations.take()

    def take_cache_amax(self) -> Tensor:
        """Largest key and value of each layer that this rank saw since the last call: [layer, 2]."""
        return self._cache.take()

    def measured(self) -> dict[str, Tensor]:
        """What forward passes have shown since the last sync: a checkpoint keeps it."""
        return {"activations": self._activations.amax_LNH, "cache": self._cache.amax_L2}

    def measure(self, seen: Mapping[str, Tensor]) -> None:
        for name, held in self.measured().items():
            held.copy_(seen[name])

    def _logprobs(self, batch: Batch) -> Tensor:
        packs = self._packs(batch, range(len(batch)))
        with torch.no_grad():
            results = self._run(packs, partial(self._collect, batch), forward_only=True)
        return self._gathered(batch, packs, results)

    def _gathered(self, batch: Batch, packs: Sequence[Pack], values: Sequence[Tensor]) -> Tensor:
        """What the replicas' packs have found, on every rank: [B, T], 0 where no pack has a token."""
        values_BT = torch.zeros(batch.mask_BT.shape, dtype=torch.float32)
        if self.ranks.reports:
            for mine, values_bT in zip(packs, values, strict=True):
                values_BT[list(mine.rows), : mine.horizon] = values_bT.cpu()
        return self.ranks.sum(values_BT)

    def logprobs_of_a_bf16_pair(self, batch: Batch) -> Tensor | None:
        """As far from the sampler's as they would be if it held BF16 weights; None where that cannot be told.

        No other engine is asked. What the sampler's format does is taken from the learner's own passes: its logprobs
        with the sampler's arithmetic are as far from the sampler's as the engines differ otherwise. To that comes how
        far tensor parallelism takes a BF16 learner from an engine on one rank.
        """
        if not self._mirrors_engine or self._formats not in ({Format.none}, *MIRRORED):
            return None
        found = self._logprobs_by(Arithmetic.plain, batch)
        if self._as_sampler is None:
            return found
        if self._engine_tp == self.layout.tp:
            return self._logprobs_by(Arithmetic.sampler, batch)
        found -= self._logprobs_by(Arithmetic.engine_bf16, batch)
        return found.add_(self._logprobs_by(Arithmetic.sampler, batch))

    def logprobs_rounded_again(self, batch: Batch) -> Tensor:
        """As `logprobs`, with one more rounding on every weight (learner/rounding.py); nothing of it stays."""
        try:
            with rounded_again(self.named_parameters()):
                self.weights_changed()
                return self.logprobs_unseen(batch)
        finally:
            self.weights_changed()

    def _logprobs_by(self, arithmetic: Arithmetic, batch: Batch) -> Tensor:
        present, self._arithmetic = self._arithmetic, arithmetic
        try:
            return self.logprobs_unseen(batch)
        finally:
            self._arithmetic = present

    def logprobs_unseen(self, batch: Batch) -> Tensor:
        """As `logprobs`, of a pass that measures nothing for the sampler."""
        with self._cache.blind():
            return self._logprobs(batch)

    def keep_reference(self) -> None:
        """Remember the present weights as the policy that a KL penalty pulls towards."""
        self._reference = [parameter.detach().clone() for _, parameter in self.named_parameters()]

    def reference_logprobs(self, batch: Batch) -> Tensor:
        """As `logprobs`, of the reference policy: its weights take the policy's place for one forward pass."""
        parameters = [parameter for _, parameter in self.named_parameters()]
        present = [parameter.detach().clone() for parameter in parameters]
        _overwrite(parameters, self._reference)
        self.weights_changed()
        try:
            with self._cache.blind():
                return self._logprobs(batch)
        finally:
            _overwrite(parameters, present)
            self.weights_changed()

    def _collect(self, batch: Batch, mine: Pack, logits_NV: Tensor, non_loss_data: bool = True) -> Tensor:
        if mine.kept_NK is None:
            logprobs_N = logprobs_alone(logits_NV, mine.labels_N, self.share, self.rollout.temperature)
        else:
            logprobs_N, _ = self._logprobs_and_entropy(logits_NV, mine)
        return mine.matrix(logprobs_N)[:, : batch.mask_BT.shape[1]].cpu()

    def _logprobs_and_entropy(self, logits_NV: Tensor, mine: Pack) -> tuple[Tensor, Tensor]:
        if mine.kept_NK is None:
            return logprobs_and_entropy(logits_NV, mine.labels_N, self.share, self.rollout.temperature)
        kept = (mine.labels_N, mine.kept_NK, self.share, self.rollout.temperature)
        return kept_logprobs_and_entropy(logits_NV, *kept)

    def _truncation(self, logits_NV: Tensor, logprobs_N: Tensor, mine: Pack, mask_bT: Tensor) -> dict[str, Tensor]:
        """Sums over the tokens that are trained on; nothing where they were drawn among all."""
        rollout = self.rollout
        if mine.kept_NK is None or rollout.top_k is None:
            return {}
        detached = (logits_NV.detach(), mine.labels_N, logprobs_N.detach())
        found = truncation(*detached, self.share, rollout.temperature, rollout.top_k, rollout.top_p)
        return {
            OUTSIDE_SUPPORT: (mine.matrix(found.outside_N.float()) * mask_bT).sum(),
            KEPT_LOG_MASS: (mine.matrix(found.log_mass_N) * mask_bT).sum(),
        }

    def _packs(self, batch: Batch, rows: Sequence[int]) -> list[Pack]:
        """This replica's micro-batches, on the device."""
        lengths = (batch.prompt_lengths_B + batch.response_lengths_B).tolist()
        learner, layout = self.learner, self.layout
        shares = assign_rows(
            [lengths[row] for row in rows],
            replicas=layout.dp,
            budget=learner.tokens_per_microbatch,
            at_least=2 * layout.pp if layout.pp > 1 else 1,  # fewer would leave stages idle
            same_count=layout.ep > 1,  # expert-parallel replicas exchange tokens in every micro-batch
            count_multiple=layout.pp if layout.chunks > 1 else 1,  # an interleaved schedule works in rounds
            attention=attention_share(self.model),
            in_step=layout.pp > 1,
        )
        multiple = limits.pack_multiple(learner)
        mine = shares[self.place.dp]
        return [pack(batch, [rows[index] for index in group], multiple).to(self.device) for group in mine]

    def _run(self, packs: Sequence[Pack], loss_function: Callable[..., Any], forward_only: bool = False) -> list[Any]:
        """megatron-core's schedule over the packs; the results of `loss_function`, on the last stage."""
        if self._as_sampler is not None:
            self._as_sampler.become(self._arithmetic)
        plain = {"fp32_output": False} if self.learner.precision is Precision.bf16 else {}

        def step(iterator: Iterator[Pack], model: torch.nn.Module) -> tuple[Tensor, Callable[..., Any]]:
            mine = next(iterator)
            mark()
            with self._forward_clock.running():
                logits_NV = model(pack=mine, **plain)
            return logits_NV, partial(loss_function, mine)

        return get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=[iter(packs) for _ in self.chunks],
            model=self.chunks,
            num_microbatches=len(packs),
            seq_length=1,  # the schedule asks each sender for the real shape
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )

    # the optimizer step

    def update(self, targets: Targets) -> dict[str, float]:
        """One optimizer step on the global minibatch; the same metrics on every rank."""
        counted_BT, groups_B = targets.denominator_mask_BT.to(self.device), targets.batch.groups_B.to(self.device)
        totals = count_totals(counted_BT, groups_B, self.rollout.max_response_tokens, targets.weights_BT)
        seen_BT = seen_tokens(self.loss, targets.mask_BT, targets.denominator_mask_BT)
        rows = seen_BT.any(dim=1).nonzero().flatten().tolist()  # the others add nothing
        if not rows:
            return self._no_update()
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        self.nonfinite.begin()
        tokens = max(1, int(targets.mask_BT.sum()))
        packs = self._packs(targets.batch, rows)
        anchored = targets.anchor_logprobs_BT is not None
        self._forward_clock.take()
        with nullcontext() if anchored else self._activations.observing():
            results = self._run(packs, partial(self._loss, targets, totals, tokens))
        if not anchored:
            logprobs_BT = self._gathered(targets.batch, packs, [logprobs_bT for _, logprobs_bT in results])
            logprobs_BT[~seen_BT.any(dim=1)] = math.nan
            self._own_pass = OwnPass(logprobs_BT, self._forward_clock.take())
        mine: dict[str, float] = {}
        if self.ranks.reports:
            for metrics, _ in results:
                for name, value in metrics.items():
                    mine[name] = mine.get(name, 0.0) + float(value)
        return self._step(targets, self.ranks.add_up(mine))

    def take_own_pass(self) -> OwnPass | None:
        """Of the last update, where it had no anchor and something to train on."""
        taken, self._own_pass = self._own_pass, None
        return taken

    def _loss(
        self, targets: Targets, totals: Totals, tokens: int, mine: Pack, logits_NV: Tensor
    ) -> tuple[Tensor, Tensor, tuple[dict[str, Any], Tensor]]:
        """The micro-batch's share of the loss, a count megatron-core wants and we do not use, metrics and logprobs."""
        unused = torch.zeros((), dtype=torch.int, device=self.device)
        if not mine.rows:
            # a replica without rows still takes part in every collective
            return logits_NV.sum() * 0.0, unused, ({}, torch.zeros(0, mine.horizon))
        with self._forward_clock.running():
            logprobs_N, entropy_N = self._logprobs_and_entropy(logits_NV, mine)
        entropy_bT, logprobs_bT = mine.matrix(entropy_N), mine.matrix(logprobs_N)
        inputs = loss_inputs(targets, mine, logprobs_bT, self.device)
        if self.loss.entropy_coef:
            inputs = replace(inputs, entropy_BT=entropy_bT)
        loss, metrics = policy_loss(inputs, self.loss, totals, self.correction)
        entropy = (entropy_bT.detach() * inputs.mask_BT).sum() / tokens
        found = {**metrics, "loss/total": loss.detach(), "loss/entropy": entropy}
        support = self._truncation(logits_NV, logprobs_N, mine, inputs.mask_BT)
        found |= {name: value / tokens for name, value in support.items()}
        return loss, unused, (found, logprobs_bT.detach())

    def _no_update(self) -> dict[str, float]:
        """No term of the loss looks at any token: weights, momentum and the schedule stay as they are."""
        return {"loss/total": 0.0, "optim/grad_norm": 0.0, "optim/updates": 0.0}

    def _step(self, targets: Targets, metrics: dict[str, float]) -> dict[str, float]:
        """Clip and step, unless something is not a number."""
        total_steps = self.run.steps * self.learner.n_minibatches
        rate = learning_rate(self.optim, self.steps, total_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.prepare_grads()
        norm = float(self.optimizer.get_grad_norm())
        finite = math.isfinite(norm) and math.isfinite(metrics.get("loss/total", 0.0))
        if finite:
            clip(self.optimizer, norm, self.clip_grad)
            self.optimizer.step_with_ready_grads()
            self.weights_changed()
            self.steps += 1
            self.nonfinite.end()
        else:
            self.nonfinite.met(targets, metrics, norm)
        return {
            **metrics,
            "optim/grad_norm": norm,
            "optim/lr": rate,
            "optim/updates": float(finite),
            "optim/skipped": float(not finite),
            "optim/clipped": float(finite and 0 < self.clip_grad < norm),
        }

    # talking to the other ranks

    def broadcast(self, value: Any = None) -> Any:
        """The driver's value on every rank: tensors, Batch, Targets, and plain JSON values around them."""
        return self.ranks.broadcast(value)

    def make_room(self) -> None:
        """On every rank, before an engine that slept takes its memory on these devices back."""
        if self.device.type != "cpu" and self.engine_sleeps:
            torch.cuda.empty_cache()
            exchange(None)  # no rank is still holding on when the driver goes ahead

    def close(self) -> None:
        leave()


@torch.no_grad()
def _overwrite(parameters: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value)


def _finalize(model: Sequence[torch.nn.Module], num_tokens: Tensor | None = None, **groups: Any) -> None:
    """megatron-core's reductions over gradients, without its division by a token count: losses come divided."""
    finalize_model_grads(list(model), None, **groups)
