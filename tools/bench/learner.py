"""An update of the learner against megatron-core's bare forward, backward and step on the same
packs; and padded.

    python tools/bench/learner.py [--shape large] [--rows 32] [--scale 80] [--rounds 5] [--top 32]

One rank on one thread, in turn in one process, its CPU seconds. *bare*: the same modules and
optimizer in megatron-core's schedule with its own cross entropy, packs made beforehand, no metrics.
*columns*: the update with no more than 1,024 columns of logits at a time (learner/modules/head.py).
*top*: the update with score centering, of `--top` top tokens at each token.
*padded*: every answer filled up to the longest. Answers are log-normal around a fifth of the
longest and cut there, prompts have 200 tokens; `--scale` times shorter.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from step import SHAPES, StepWorkload
from torch import Tensor

from megatron_rl.learner.learner import Learner  # before megatron: patches CPU operators

from megatron.core.pipeline_parallel import get_forward_backward_func  # isort: skip
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy  # isort: skip

from megatron_rl.batch import Batch, UpdateInputs
from megatron_rl.config import from_mapping
from megatron_rl.config.schema import Config
from megatron_rl.learner.modules import costs
from megatron_rl.learner.modules.packing import Pack
from megatron_rl.models.layout import Layout
from megatron_rl.models.model import Model

LONGEST = 20480
LONG_PROMPT = 200
PROMPT = 8


def make_learner(work: StepWorkload, budget: int) -> Learner:
    shape = {
        "model_type": "qwen3",
        "vocab_size": work.vocab,
        "hidden_size": work.hidden,
        "num_hidden_layers": work.layers,
        "num_attention_heads": work.heads,
        "num_key_value_heads": work.kv_heads,
        "head_dim": work.head_dim,
        "intermediate_size": work.ffn,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 32768,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
    }
    config: Config = from_mapping(
        {"learner": {"tokens_per_microbatch": budget}, "optim": {"lr": 1e-6}}
    )
    learner = Learner(Model.of(shape, Layout.from_config(config.learner)), config)
    learner.init_random(7)
    return learner


def lengths_of(rows: int, longest: int, random: torch.Generator) -> list[int]:
    drawn = torch.empty(rows).log_normal_(0.0, 0.9, generator=random) * longest / 5
    return [LONG_PROMPT + int(length) for length in drawn.clamp(1, longest)]


def random_batch(lengths_B: Tensor, prompt: int, vocab: int, logprob: float) -> Batch:
    """Responses of these lengths to prompts of `prompt` tokens."""
    random = torch.Generator().manual_seed(1)
    rows = len(lengths_B)
    answered = int(lengths_B.sum())
    return Batch(
        prompt_lengths_B=torch.full((rows,), prompt),
        response_lengths_B=lengths_B,
        groups_B=torch.arange(rows) // 8,
        rewards_B=torch.rand(rows, generator=random),
        versions_B=torch.zeros(rows, dtype=torch.int64),
        tokens_P=torch.randint(
            1, vocab, (rows * prompt + answered,), generator=random, dtype=torch.int32
        ),
        mask_N=torch.ones(answered, dtype=torch.bool),
        sampler_logprobs_N=torch.full((answered,), logprob),
    )


def make_batch(rows: int, scale: int, vocab: int, filled: bool = False) -> Batch:
    """`filled`: padding after a response is marked as part of it."""
    random = torch.Generator().manual_seed(1)
    lengths_B = torch.tensor(lengths_of(rows, LONGEST, random)) // scale
    if filled:
        lengths_B = lengths_B.clamp(min=int(lengths_B.max()))
    return random_batch(lengths_B, PROMPT, vocab, -8.0)


def targets_of(batch: Batch, anchor_N: Tensor) -> UpdateInputs:
    return UpdateInputs(
        prompt_lengths_B=batch.prompt_lengths_B,
        response_lengths_B=batch.response_lengths_B,
        groups_B=batch.groups_B,
        sampler_logprobs_N=batch.sampler_logprobs_N,
        anchor_logprobs_N=anchor_N,
        ref_logprobs_N=None,
        advantages_B=torch.linspace(-1, 1, len(batch)),
        weights_N=torch.ones(batch.mask_N.shape),
        mask_N=batch.mask_N,
        denominator_mask_N=batch.mask_N,
    )


def bare(learner: Learner, packs: list[Pack]) -> None:
    (module,), tokens = learner.modules, sum(len(mine.labels_N) for mine in packs)

    def logits(mine: Pack) -> Tensor:
        hidden_S1H = module.embedding(mine.tokens_S[None], mine.positions_S[None])
        packed, angles = module._packed(mine)
        hidden_S1H = module.decoder(
            hidden_states=hidden_S1H,
            attention_mask=None,
            rotary_pos_emb=angles,
            packed_seq_params=packed,
        )
        weight = module.shared_embedding_or_output_weight()
        return module.output_layer(hidden_S1H.index_select(0, mine.logit_index_N), weight=weight)[0]

    def step(iterator: Iterator[Pack], model: torch.nn.Module) -> tuple[Tensor, Callable[..., Any]]:
        mine = next(iterator)

        def loss(logits_N1V: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
            each_N1 = vocab_parallel_cross_entropy(logits_N1V.float(), mine.labels_N[:, None])
            return each_N1.sum() / tokens, torch.zeros((), dtype=torch.int), {}

        return logits(mine), loss

    for chunk in learner.chunks:
        chunk.zero_grad_buffer()
    learner.optimizer.zero_grad()
    get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=[iter(packs)],
        model=learner.chunks,
        num_microbatches=len(packs),
        seq_length=1,
        micro_batch_size=1,
        forward_only=False,
    )
    learner.optimizer.step()


def with_top(
    batch: Batch, targets: UpdateInputs, top: int, vocab: int
) -> tuple[Batch, UpdateInputs]:
    """The same with score centering, of `top` random top tokens at each token."""
    tokens = len(batch.mask_N)
    random = torch.Generator().manual_seed(2)
    columns: dict[str, Any] = {
        "top_counts_N": torch.full((tokens,), top, dtype=torch.int16),
        "top_logprobs_E": torch.full((tokens * top,), -8.0).half(),
    }
    ids_E = torch.randint(vocab, (tokens * top,), generator=random, dtype=torch.int32)
    batch = replace(batch, **columns, top_ids_E=ids_E)
    centering: dict[str, Any] = {
        "top_sampled_E": batch.top_sampled_E,
        "top_anchor_E": columns["top_logprobs_E"].float(),
        "top_weights_E": torch.ones(tokens * top),
        "tail_weights_N": torch.ones(tokens),
    }
    return batch, replace(targets, **columns, **centering)


def few_columns(update: Callable[[], object]) -> None:
    with mock.patch.multiple(costs, LOGIT_BYTES=0, LEAST_COLUMNS=1024):
        update()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="large", choices=sorted(SHAPES))
    for name, usual in (
        ("rows", 32),
        ("scale", 80),
        ("budget", 2048),
        ("rounds", 5),
        ("top", 32),
    ):
        parser.add_argument(f"--{name}", type=int, default=usual)
    options = parser.parse_args()
    torch.set_num_threads(1)
    work = SHAPES[options.shape]
    learner = make_learner(work, options.budget)
    torch.set_num_threads(1)
    batch, filled = (
        make_batch(
            options.rows,
            options.scale,
            work.vocab,
            filled,
        )
        for filled in (False, True)
    )
    share = learner.part(batch), targets_of(batch, learner.logprobs(batch))
    padded = learner.part(filled), targets_of(filled, learner.logprobs(filled))
    more, more_targets = with_top(batch, share[1], options.top, work.vocab)
    top = learner.part(more), more_targets
    packs = learner._packs(share[0], torch.arange(len(batch)))
    ways: dict[str, Callable[[], object]] = {
        "bare": lambda: bare(learner, packs),
        "update": lambda: learner.update(*share),
        "top": lambda: learner.update(*top),
        "columns": lambda: few_columns(lambda: learner.update(*share)),
        "padded": lambda: learner.update(*padded),
    }
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(options.rounds + 1):
        for name, way in ways.items():
            begun = time.thread_time()
            way()
            if number:  # the first makes room in memory
                taken[name].append(time.thread_time() - begun)
    print(
        f"{options.shape}: {len(batch.tokens_P)} tokens in {len(packs)} packs, "
        f"{len(filled.tokens_P)} with filler"
    )
    for name, seconds in taken.items():
        ratios = [
            statistics.median(a / b for a, b in zip(seconds, taken[of], strict=True))
            for of in ("bare", "update")
        ]
        print(
            f"{name:<8} {statistics.median(seconds):7.3f} s   {ratios[0]:.3f} of bare, "
            f"{ratios[1]:.3f} of the update"
        )


if __name__ == "__main__":
    main()
