"""The output layer with logprobs and entropy: logits held, and columns at a time; seconds, and
memory that each makes.

    python tools/bench/head.py [--tokens 4096] [--columns 151936] [--hidden 4096] [--rounds 3]
    [--kept 20] [--fp32-head]
        [--entropy-gradient]

Forward and backward in BF16, in turn on one thread, its CPU seconds. Memory is the most that
tensors made meanwhile hold at one time over the bytes of BF16 logits, less the gradients of weight
and hidden states, which do not exist yet when it is at its most with logits held; counted in a
round of its own. `--kept`: among so many tokens, with the supports compared.
"""

from __future__ import annotations

import argparse
import statistics
import time
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from corrections import peak_bytes

from megatron_rl.learner.modules import cpu  # before megatron

from megatron.core import parallel_state  # isort: skip
from megatron.core.tensor_parallel.layers import ColumnParallelLinear  # isort: skip
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_rl.learner.modules.head import LogprobRequest, scores
from megatron_rl.learner.modules.linear import widen
from megatron_rl.learner.modules.logprobs import VocabShare

BF16 = 2


def output_layer(hidden: int, columns: int, wide: bool) -> ColumnParallelLinear:
    assert cpu.ON_CPU
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    config = TransformerConfig(
        num_layers=1,
        hidden_size=hidden,
        num_attention_heads=1,
        params_dtype=torch.bfloat16,
        use_cpu_initialization=True,
    )
    layer = ColumnParallelLinear(
        hidden,
        columns,
        config=config,
        init_method=torch.nn.init.zeros_,
        bias=False,
        skip_bias_add=False,
    )
    with torch.no_grad():
        layer.weight.normal_(std=hidden**-0.5)
    if wide:
        widen(layer)
    return layer


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, usual in (
        ("tokens", 4096),
        ("columns", 151_936),
        ("hidden", 4096),
        ("rounds", 3),
        ("kept", 0),
    ):
        parser.add_argument(f"--{name}", type=int, default=usual)
    for name in ("fp32-head", "entropy-gradient"):
        parser.add_argument(f"--{name}", action="store_true")
    options = parser.parse_args()
    tokens = options.tokens
    columns = options.columns
    torch.set_num_threads(1)
    random = torch.Generator().manual_seed(1)
    layer = output_layer(options.hidden, columns, options.fp32_head)
    hidden_N1H = (
        torch.randn(
            tokens,
            1,
            options.hidden,
            generator=random,
        )
        .bfloat16()
        .requires_grad_()
    )
    kept_NK = None
    if options.kept:
        kept_NK = torch.stack(
            [torch.randperm(columns, generator=random)[: options.kept] for _ in range(tokens)]
        )
    if kept_NK is None:
        labels_N = torch.randint(columns, (tokens,), generator=random)
    else:
        labels_N = kept_NK[:, 0]
    pack: Any = SimpleNamespace(labels_N=labels_N, kept_NK=kept_NK)
    asked = LogprobRequest(
        VocabShare.of(0, 1, columns, columns, None),
        1.0,
        top_k=options.kept or None,
    )

    def both_ways(held: bool) -> None:
        layer.weight.grad = hidden_N1H.grad = None
        found = scores(layer, hidden_N1H, None, pack, asked, held)
        loss = found.logprobs_N.sum()
        (
            loss + found.entropy_N.sum()
            if options.entropy_gradient and found.entropy_N is not None
            else loss
        ).backward()

    ways = {"held": True, "columns at a time": False}
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(options.rounds):
        for name, held in ways.items():
            begun = time.thread_time()
            both_ways(held)
            taken[name].append(time.thread_time() - begun)
    print(f"{tokens} tokens x {columns} columns, hidden {options.hidden}")
    gradients = (layer.weight.numel() + hidden_N1H.numel()) * BF16
    for name, held in ways.items():
        layer.weight.grad = hidden_N1H.grad = None
        seconds = statistics.median(taken[name])
        ratio = statistics.median(a / b for a, b in zip(taken[name], taken["held"], strict=True))
        most = peak_bytes(partial(both_ways, held)) - (0 if held else gradients)
        share = most / (tokens * columns * BF16)
        print(
            f"{name:<18} {seconds:7.3f} s, {ratio:.3f} of held; memory {share:.3f} of BF16 logits"
        )


if __name__ == "__main__":
    main()
