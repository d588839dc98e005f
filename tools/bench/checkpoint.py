"""What a checkpoint costs the step, against a plain copy of the same bytes; and what writing it costs the next ones.

    python tools/bench/checkpoint.py [--hidden 768] [--layers 8] [--saves 5]

Blocked: from the call to its return, which is all that the loop waits for. Beside it the same bytes are copied from one
warm piece of memory to another. Then optimizer steps without a save and with one under way are timed in turn.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch

from megatron_rl.batch import Batch, Targets
from megatron_rl.checkpoint.saver import Saver
from megatron_rl.config.schema import (
    CheckpointSection,
    Config,
    Format,
    Forward,
    LearnerSection,
    OptimSection,
    QuantizationSection,
    SyncSection,
)
from megatron_rl.learner import state
from megatron_rl.learner.learner import Learner
from megatron_rl.learner.policy import Sections
from megatron_rl.models.layout import Layout
from megatron_rl.models.model import Model
from megatron_rl.weight_sync.push import WeightSync

VOCAB = 32000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--saves", type=int, default=5)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args()
    learner = make_learner(options.hidden, options.layers)
    targets = make_targets(options.rows, options.tokens)
    learner.update(targets)
    nbytes = sum(block.tensor.nbytes for block in state.LearnerState(learner).blocks())
    parameters = sum(parameter.numel() for _, parameter in learner.named_parameters())
    with tempfile.TemporaryDirectory(prefix="megatron-rl-bench-") as folder:
        sync = WeightSync(
            learner,
            None,
            [],
            quantization=Config().quantization,
            sync=SyncSection(dir=folder),
            engines=Config().sampler,
            fleet=False,
        )
        (Path(folder) / "checkpoints").mkdir()  # as whoever starts a run does
        saver = Saver(Path(folder) / "checkpoints", CheckpointSection(keep_last=1), learner, sync, print)
        copy, blocked, alone, beside = [], [], [], []
        source, target = torch.ones(nbytes, dtype=torch.uint8), torch.ones(nbytes, dtype=torch.uint8)
        for step in range(options.saves + 1):
            alone.append(seconds(lambda: learner.update(targets)))
            copy.append(seconds(lambda: target.copy_(source)))
            blocked.append(
                seconds(
                    lambda step=step: (
                        saver.snapshot_rng_and_stats(),
                        saver.begin(step, {"driver": {"position": step, "seen": {}}}),
                    )
                )
            )
            during = []
            while saver._pending:
                during.append(seconds(lambda: learner.update(targets)))
                saver.settle()
            beside.append((statistics.fmean(during), len(during)))
    copy, blocked, alone = copy[1:], blocked[1:], alone[1:]  # the first save makes its room in memory
    slow = [mean / before for (mean, _), before in zip(beside[1:], alone, strict=True)]
    print(f"{parameters / 1e6:.1f}M parameters, {nbytes / 1e9:.2f} GB of state")
    print(f"plain copy {statistics.median(copy) * 1e3:7.0f} ms")
    print(f"blocked    {statistics.median(blocked) * 1e3:7.0f} ms   {median_ratio(blocked, copy):.2f} of a plain copy")
    print(f"step       {statistics.median(alone) * 1e3:7.0f} ms")
    steps = statistics.fmean(count for _, count in beside)
    print(f"   beside a save {statistics.median(slow):.3f} of that, for {steps:.1f} steps")


def median_ratio(these: list[float], those: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(these, those, strict=True))


def seconds(work: object) -> float:
    start = time.perf_counter()
    work()  # type: ignore[operator]
    return time.perf_counter() - start


def make_learner(
    hidden: int, layers: int, forward: Forward = Forward.bf16, format: Format = Format.int8, vocab: int = VOCAB
) -> Learner:
    hf = {
        "model_type": "qwen3",
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 128,
        "head_dim": 64,
        "vocab_size": vocab,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
    }
    section = LearnerSection(forward=forward)
    config = Config(learner=section, optim=OptimSection(lr=1e-5), quantization=QuantizationSection(format))
    learner = Learner(Model.of(hf, Layout.from_config(section)), Sections.of(config))
    learner.init_random(1)
    return learner


def make_targets(rows: int, tokens: int, vocab: int = VOCAB) -> Targets:
    random = torch.Generator().manual_seed(1)
    lengths_B = torch.full((rows,), tokens)
    mask_BT = torch.ones(rows, tokens, dtype=torch.bool)
    batch = Batch.of_matrices(
        tokens_BS=torch.randint(1, vocab, (rows, 2 * tokens), generator=random),
        prompt_lengths_B=lengths_B,
        response_lengths_B=lengths_B,
        mask_BT=mask_BT,
        sampler_logprobs_BT=torch.full((rows, tokens), -10.0),
        rewards_B=torch.rand(rows, generator=random),
        groups_B=torch.arange(rows) // 4,
        versions_B=torch.zeros(rows, dtype=torch.int64),
    )
    return Targets(
        batch=batch,
        anchor_logprobs_BT=batch.sampler_logprobs_BT,
        ref_logprobs_BT=None,
        advantages_B=torch.randn(rows, generator=random),
        weights_BT=torch.ones(rows, tokens),
        mask_BT=mask_BT,
        denominator_mask_BT=mask_BT,
    )


if __name__ == "__main__":
    main()
