"""Forward passes, base class of Learner: logprobs by its own weights, the reference's or re-rounded
ones, or as the sampler computes; and statistics of passes: maxima for the sync's scales, router
flips.

B rows of a batch, N response tokens, S positions, L layers, E top tokens at all tokens.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron_rl.learner.policy import Policy

# patches torch for CPUs before megatron is imported
from megatron_rl.types import Metrics

from megatron.core.pipeline_parallel import get_forward_backward_func  # isort: skip

from megatron_rl.batch import Batch, Share, places_of
from megatron_rl.config.fleet import replica_formats
from megatron_rl.config.schema import (
    Config,
    Format,
    Forward,
    KvCache,
    Precision,
    QuantizationSection,
)
from megatron_rl.learner.modules import limits
from megatron_rl.learner.modules.as_sampler import AsSampler
from megatron_rl.learner.modules.context import split
from megatron_rl.learner.modules.costs import attention_share
from megatron_rl.learner.modules.fake_quantized import Rounding, fake_quantized
from megatron_rl.learner.modules.head import LogprobOutput, LogprobRequest
from megatron_rl.learner.modules.lora import adapters_off
from megatron_rl.learner.modules.observers import ActivationStats, CacheStats
from megatron_rl.learner.modules.packing import Pack, costs_of, micro_batches, pack, unpadded
from megatron_rl.learner.modules.router_replay import RouterReplay, shares
from megatron_rl.learner.profile import Profiler
from megatron_rl.learner.shares import BatchInfo, DataPlane, minibatches, rows_of_replicas
from megatron_rl.learner.weights import exchanged, rounded_again
from megatron_rl.models.model import Model
from megatron_rl.processes.heartbeat import mark
from megatron_rl.quantization.cpu_matmul import has_fp8
from megatron_rl.quantization.smoothing import Smoothing

MIRRORED = ({Format.int8}, {Format.fp8})  # formats of engines that it can compute as


class ForwardPasses(Policy):
    """A policy that all ranks pass the same batch through, and get the same results back."""

    profiler: Profiler

    def __init__(self, model: Model, config: Config) -> None:
        super().__init__(model, config)
        quantization = config.quantization
        sampler = config.sampler
        self.rollout = config.rollout
        self.data_plane = DataPlane(self.ranks)
        self._attention = attention_share(self.model)
        self.own_layers = self.layout.own_layers(self.shape.layers, self.place.pp)
        self._reference: list[Tensor] = []
        self._activations = ActivationStats(self.shape, self.device)
        self._cache = CacheStats(self.shape, self.device)
        self.measured = {"activations": self._activations.amax, "cache": self._cache.amax}
        self._replay: RouterReplay | None = None
        if self.shape.experts:
            self._replay = RouterReplay(self.shape.layers, self.device, self.learner.router)
        for first_layer, module in self.numbered_modules:
            if self._replay is not None:
                self._replay.watch(
                    module, first_layer, self.own_layers.index(first_layer), self.positions_shard
                )
            if quantization.smoothing:
                self._activations.watch(module, first_layer, self.positions_shard)
            if quantization.kv_cache != KvCache.none:
                self._cache.watch(module, first_layer)
        self._engine_tp = sampler.tensor_parallel
        self._formats = {*replica_formats(sampler, quantization)}
        wanted = self.learner.forward is Forward.as_sampler and quantization.format != Format.none
        self._quantizes = wanted  # in every pass, as the sampler does
        self._as_sampler: AsSampler | None = None
        # whose rounding layers of Transformer Engine imitate for a probe
        self._engine: Rounding | None = None
        self._smoothing: Smoothing | None = None
        if wanted or (self._formats in MIRRORED and self.device.type == "cpu"):
            self._as_sampler = self._computes_as(quantization, wanted)
        elif self._formats in MIRRORED and quantization.kv_cache == KvCache.none:
            self._engine = Rounding(
                quantization.format, tuple(quantization.ignore), self._engine_tp
            )

    @property
    def mirrors_engine(self) -> bool:
        """True if the learner's layers round, or can round, where the engine's BF16 layers do."""
        plain = self.device.type == "cpu" and self.learner.precision is Precision.bf16
        known = Format.fp8 not in self._formats or not has_fp8()
        return plain and known and self._engine_tp in (1, self.layout.tp)

    def _computes_as(self, quantization: QuantizationSection, wanted: bool) -> AsSampler:
        if self.device.type != "cpu":
            raise ValueError("learner.forward=as_sampler is CPU-only so far; use bf16 here")
        if wanted and quantization.format == Format.fp8 and has_fp8():
            raise ValueError(
                "learner.forward=as_sampler with quantization.format=fp8: this processor "
                "multiplies FP8 itself, and vLLM leaves it to it; use bf16, or quantization=int8"
            )
        layers = AsSampler(
            self.model, self.groups, quantization.format, quantization.ignore, self._engine_tp
        )
        for first_layer, module in self.numbered_modules:
            layers.watch(module, first_layer)
        return layers

    def weights_changed(self) -> None:
        if self._as_sampler is not None:
            self._as_sampler.stale = True

    def set_smoothing(self, smoothing: Smoothing | None) -> None:
        """Set the smoothing scales of the sampler's weights, for passes in its arithmetic."""
        self._smoothing = smoothing
        if self._as_sampler is not None:
            self._as_sampler.smoothing = smoothing

    # batches

    def split(self, batch: Batch | None, updates: int = 1, seed: str = "") -> Share:
        """The replica's rows of the driver's batch, which is split into minibatches."""
        about = self.data_plane.announce(batch)
        rows_of, parts = self._assign(about, updates, seed)
        return replace(self.data_plane.hand_out(batch, about, rows_of), minibatches=parts)

    def part(self, batch: Batch) -> Share:
        """The replica's rows of a batch that every rank has."""
        about = BatchInfo.of(batch)
        rows_of, parts = self._assign(about, 1, "")
        mine = batch.rows(rows_of[self.place.replica])
        return Share(mine, about.table, rows_of, self.ranks.replicas, parts)

    def _assign(
        self, about: BatchInfo, updates: int, seed: str
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Rows of each replica, and of each update."""
        parts = minibatches(about.table.groups_B, updates, seed)
        return rows_of_replicas(about, parts, self.layout.dp, self._attention), parts

    # logprobs: float32 at rollout.temperature, of the replica's response tokens; of a batch that
    # every rank has, of all its response tokens

    def logprobs(self, batch: Batch | Share) -> Tensor:
        """Logprob of every response token; measures the activations for the sampler's scales."""
        with self._activations.looking(True):
            return self._logprobs(batch)

    def logprobs_of_top(self, share: Share) -> tuple[Tensor, Tensor]:
        """As `logprobs`, and the logprob of every top token: [N], [E]."""
        batch = share.batch
        with self._activations.looking(True):
            packs, results = self._results(share, self._asked(entropy=False, top=True))
        top = []
        for mine, (_, top_NM) in zip(packs if results else (), results, strict=True):
            rows = torch.tensor(mine.rows, dtype=torch.int64)
            counts_N = batch.taken("top_counts_N", rows)
            top.append(unpadded(top_NM, counts_N, int(counts_N.sum())))
        logprobs_N = self._gathered(share, packs, [each_N for each_N, _ in results])
        return logprobs_N, self._gathered(share, packs, top, batch.top_sizes_B)

    def logprobs_unseen(self, batch: Batch | Share) -> Tensor:
        """Logprobs by a pass that measures nothing for the sampler."""
        with self._cache.looking(False):
            return self._logprobs(batch)

    def expected_logprobs(self, batch: Batch) -> Tensor | None:
        """Return the logprobs of a correct sampler of this format, up to rounding, from layers
        quantized as its own.

        Token by token where the learner `mirrors_engine`; else off by as much, but at other tokens:
        any other rounding moves codes. None where the format is not imitated: several at once,
        blocks, an FP8 cache, INT4 without `learner.forward: as_sampler`.
        """
        if self._as_sampler is not None:
            present = self._quantizes
            self._quantizes = True
            try:
                return self.logprobs_unseen(batch)
            finally:
                self._quantizes = present
        if self._engine is None:
            return None
        with fake_quantized(
            self.numbered_modules, self.model, self.groups, self._engine, self._smoothing
        ):
            return self.logprobs_unseen(batch)

    def logprobs_rounded_again(self, batch: Batch) -> Tensor:
        """Logprobs with one more rounding on every weight, which is undone after (weights.py)."""
        return self._logprobs_with(rounded_again(self.named_parameters()), batch)

    def keep_reference(self) -> None:
        """Keep the present weights as the reference of the KL penalty; adapters start at zero."""
        if self.shape.lora is not None:
            return
        self._reference = [parameter.detach().clone() for _, parameter in self.named_parameters()]

    def reference_logprobs(self, batch: Batch | Share) -> Tensor:
        """Return the reference policy's logprobs: its weights replace the policy's for a forward
        pass.
        """
        if self.shape.lora is not None:
            return self._logprobs_with(adapters_off(self.modules), batch)
        parameters = [parameter for _, parameter in self.named_parameters()]
        return self._logprobs_with(exchanged(parameters, self._reference), batch)

    def _logprobs_with(
        self, other_weights: AbstractContextManager[None], batch: Batch | Share
    ) -> Tensor:
        try:
            with other_weights:
                self.weights_changed()
                return self.logprobs_unseen(batch)
        finally:
            self.weights_changed()

    def _logprobs(self, batch: Batch | Share) -> Tensor:
        if isinstance(batch, Batch):
            share = self.part(batch)
            return self.data_plane.join(self._logprobs(share), share)
        packs, results = self._results(batch, self._asked(entropy=False))
        return self._gathered(batch, packs, [logprobs_N for logprobs_N, _ in results])

    def _results(self, share: Share, asked: LogprobRequest) -> tuple[list[Pack], list[Any]]:
        """Run a forward pass; return its packs and, on the last stage, results of each."""
        packs = self._packs(share, torch.arange(len(share.all)))
        with torch.no_grad(), self.profiler.tracing("forward", len(packs) * len(self.chunks)):
            return packs, self._run(packs, asked, self._collect, forward_only=True)

    def _asked(self, entropy: bool = True, top: bool = False) -> LogprobRequest:
        rollout = self.rollout
        return LogprobRequest(
            self.share,
            rollout.temperature,
            entropy,
            rollout.top_k if entropy else None,
            rollout.top_p,
            top,
        )

    def _collect(self, mine: Pack, found: LogprobOutput) -> tuple[Tensor, Tensor | None]:
        top_NM = found.top_logprobs_NM
        return found.logprobs_N.cpu(), None if top_NM is None else top_NM.cpu()

    def _gathered(
        self,
        share: Share,
        packs: Sequence[Pack],
        values: Sequence[Tensor],
        sizes_B: Tensor | None = None,
    ) -> Tensor:
        """Values of the replica's packs, on all its ranks; 0 where no pack has a token. `sizes_B`:
        number of values of each row; None: one for each response token.
        """
        if sizes_B is None:
            sizes_B = share.batch.response_lengths_B
        entries = int(sizes_B.sum())
        found = None
        if self.ranks.reports:
            found = torch.zeros(entries)
            for mine, of_pack in zip(packs, values, strict=True):
                rows = torch.tensor(mine.rows, dtype=torch.int64)
                found[places_of(sizes_B, rows)] = of_pack.cpu()
        return self.data_plane.share_values(found, entries)

    # what passes show

    def take_activation_amax(self) -> Tensor:
        """[layer, norm, channel]: largest output of each norm that this rank saw in scoring since
        the last call.
        """
        return self._activations.take()

    def take_cache_amax(self) -> Tensor:
        """Largest key and value of each layer on this rank since the last call: [layer, 2]."""
        return self._cache.take()

    def router_flips(self, batch: Batch, chosen_PLK: Tensor) -> Metrics:
        """The share of tokens of which some expert differs from `chosen_PLK` (the engine's; -1:
        none), by layer and in all.
        """
        if self._replay is None:
            return {}
        with self._replay.comparing() as counts_L3:
            self.logprobs_unseen(replace(batch, experts_PLK=chosen_PLK))
        _, tokens_L, flips_L = self.ranks.sum(counts_L3).t().tolist()
        if not any(tokens_L):
            return {}
        return {"sync/router_flips": sum(flips_L) / sum(tokens_L)} | {
            f"sync/router_flips/layer_{layer}": flips / tokens
            for layer, (flips, tokens) in enumerate(zip(flips_L, tokens_L, strict=True))
            if tokens
        }

    def take_replayed(self) -> Metrics:
        """Shares of tokens replayed since the last call, and of those that the routers flip.

        By layer and in total. Empty without replay or experts.
        """
        if self._replay is None or not self._replay.replays:
            return {}
        return shares(self.ranks.sum(self._replay.take()))

    # packs

    def _packs(self, share: Share, rows: Tensor) -> list[Pack]:
        """The replica's micro-batches of these rows of the table."""
        lengths = share.all.lengths_B.tolist()
        layout = self.layout
        asked = set(rows.tolist())
        groups = micro_batches(
            [[row for row in own.tolist() if row in asked] for own in share.rows_of],
            self.place.replica,
            lengths,
            costs_of(lengths, self._attention),
            budget=self.learner.tokens_per_microbatch,
            at_least=2 * layout.pp if layout.pp > 1 else 1,  # fewer would leave stages idle
            same_count=layout.ep
            > 1,  # expert-parallel replicas exchange tokens in every micro-batch
            count_multiple=layout.pp
            if layout.chunks > 1
            else 1,  # an interleaved schedule works in rounds
            in_step=layout.pp > 1,
        )
        place = {row: at for at, row in enumerate(share.own.tolist())}
        multiple = limits.pack_multiple(self.learner)
        packs = []
        for group in groups:
            one = pack(share.batch, [place[row] for row in group], multiple, layout.cp)
            if layout.cp > 1:
                one = split(one, self.place.cp, layout.cp)
            # the driver has the choices of all stages' layers
            chosen_SLK = one.experts_SLK
            if chosen_SLK is not None and chosen_SLK.shape[1] > len(self.own_layers):
                one = replace(one, experts_SLK=chosen_SLK[:, self.own_layers])
            packs.append(one.to(self.device))
        return packs

    def _run(
        self,
        packs: Sequence[Pack],
        asked: LogprobRequest,
        loss_function: Callable[..., Any],
        forward_only: bool = False,
    ) -> list[Any]:
        """megatron-core's schedule over the packs; results of `loss_function` on the last stage."""
        if self._as_sampler is not None:
            self._as_sampler.use(self._quantizes)
        if self.learner.precision is Precision.bf16:
            plain = {"fp32_output": False}
        else:
            plain = {}

        def step(
            iterator: Iterator[Pack], model: torch.nn.Module
        ) -> tuple[Tensor, Callable[..., Any]]:
            mine = next(iterator)
            mark()
            self.profiler.micro_batch()
            found = model(pack=mine, asked=asked, **plain)
            # megatron-core wants a tensor
            return found.logprobs_N if isinstance(
                found, LogprobOutput
            ) else found, lambda *_, **__: loss_function(mine, found)

        with (
            self._replay.passing(trains=not forward_only)
            if self._replay is not None
            else nullcontext()
        ):
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
