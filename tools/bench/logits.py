"""What entropy costs beside logprobs: the part of a pass behind the logits, with it and without, in turn.

    python tools/bench/logits.py [--tokens 1024] [--columns 32000] [--rounds 15]

An update asks for entropy, because it logs it (and for its gradient with loss.entropy_coef alone); prox, reference and
probe do not. `divided`: at a temperature other than 1.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from megatron_rl.learner.modules.logprobs import VocabShare, logprobs_and_entropy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--columns", type=int, default=32000)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    random = torch.Generator().manual_seed(1)
    logits_NV = torch.randn(options.tokens, options.columns, generator=random).bfloat16()
    labels_N = torch.randint(0, options.columns, (options.tokens,), generator=random)
    share = VocabShare.of(0, 1, options.columns, options.columns, None)
    ways: dict[str, Callable[[], object]] = {
        "with entropy": lambda: logprobs_and_entropy(logits_NV, labels_N, share),
        "logprobs alone": lambda: logprobs_and_entropy(logits_NV, labels_N, share, entropy=False),
        "alone, divided": lambda: logprobs_and_entropy(logits_NV, labels_N, share, 0.8, entropy=False),
    }
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(options.rounds + 1):
        for name, way in ways.items():
            begun = time.thread_time()
            with torch.no_grad():
                way()
            if number:  # the first of each makes its room in memory
                taken[name].append(time.thread_time() - begun)
    print(f"{options.tokens} tokens x {options.columns} columns, BF16, seconds of a core")
    for name, seconds in taken.items():
        ratio = statistics.median(a / b for a, b in zip(seconds, taken["with entropy"], strict=True))
        print(f"{name:<15} {statistics.median(seconds):.4f} s   {ratio:.2f} of that with entropy")


if __name__ == "__main__":
    main()
