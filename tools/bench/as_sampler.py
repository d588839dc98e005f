"""What `learner.forward=as_sampler` costs: a pass for logprobs and an update, against the plain layers, in turn.

    python tools/bench/as_sampler.py [--format int8] [--hidden 768] [--layers 8] [--vocab 32000]

One learner, on one rank that keeps its memory, computes either way. Weights are quantized and packed once after each
update, whatever passes follow: "logprobs, new weights" has all of that in it, the others nothing.
"""

from __future__ import annotations

import argparse
import statistics

from checkpoint import VOCAB, make_learner, make_targets, seconds

from megatron_rl.config.schema import Format, Forward
from megatron_rl.learner.learner import Learner
from megatron_rl.processes.process import keep_freed_memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--format", default="int8", choices=("int8", "fp8"))
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=VOCAB, help="the output layer is BF16 either way")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    keep_freed_memory()  # as every rank
    learner = make_learner(options.hidden, options.layers, Forward.as_sampler, Format(options.format), options.vocab)
    targets = make_targets(options.rows, options.tokens, options.vocab)
    parameters = sum(parameter.numel() for _, parameter in learner.named_parameters())
    layers = learner._as_sampler
    taken: dict[str, list[list[float]]] = {"plain": [], "as_sampler": []}
    for number in range(options.rounds + 1):
        for name, held in taken.items():
            compute(learner, layers if name == "as_sampler" else None)
            times = [seconds(lambda: learner.logprobs(targets.batch)) for _ in range(2)]
            times.append(seconds(lambda: learner.update(targets)))
            if number:  # the first of each makes its room in memory
                held.append(times)
    print(f"{options.format}, {parameters / 1e6:.1f}M parameters, {options.rows} rows of {2 * options.tokens} tokens")
    for place, name in enumerate(("logprobs, new weights", "logprobs", "update")):
        plain, sampled = ([times[place] for times in held] for held in taken.values())
        ratio = statistics.median(a / b for a, b in zip(sampled, plain, strict=True))
        median = [f"{statistics.median(times):5.2f} s" for times in (plain, sampled)]
        print(f"{name:21} plain {median[0]}   as_sampler {median[1]}   {ratio:.2f}")


def compute(learner: Learner, layers: object) -> None:
    """As the sampler, or with plain layers: `layers` is None."""
    learner._as_sampler = layers  # type: ignore[assignment]
    for module in learner.modules:
        for layer in module.modules():
            if hasattr(layer, "sampled"):
                layer.sampled = None
    learner.weights_changed()


if __name__ == "__main__":
    main()
