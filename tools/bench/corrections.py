"""Speed and memory of rollout_correction.

Compares it with the same computation written plainly, one full-size tensor operation after the
other, on 512 x 2048 float32 logprobs with token-level truncation, one geometric rule and all
metrics; the plain one pads responses to the longest, ours reads them one after another:

    python tools/bench/corrections.py

    python tools/bench/corrections.py --choices     # each weight and rule in place of `tis`, as a
    multiple of its time

Both keep the memory that they free (glibc), so that neither pays for pages the kernel has to clear.

Shape legend: B sequences, T response positions.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from megatron_rl.batch import Batch
from megatron_rl.config.schema import CorrectionConfig, RejectRule, WeightConfig
from megatron_rl.rollout_correction.correction import rollout_correction

CAP = 2.0
LOW = 0.99
HIGH = 1.01
MEAN = {"stat": "ratio", "reduce": "mean", "low": LOW, "high": HIGH}
CONFIG = CorrectionConfig(
    weight=WeightConfig(level="token", high=CAP), reject=[RejectRule(level="sequence", **MEAN)]
)
# turns of a session in the example: what is timed by turn has this many columns' worth of tokens in
# each
TURN_COLUMNS = 128


def choices() -> dict[str, CorrectionConfig]:
    """Corrections that are to take no more than 1.5 times as long as `tis`."""
    weights = {
        "tis": WeightConfig(high=CAP),
        "sequence": WeightConfig(level="sequence", high=CAP),
        "sequence geometric": WeightConfig(level="sequence", aggregate="geometric", high=CAP),
        "turn": WeightConfig(level="turn", high=CAP),
        "turn geometric": WeightConfig(level="turn", aggregate="geometric", high=CAP),
        "prefix": WeightConfig(level="prefix", high=CAP),
        "prefix geometric": WeightConfig(level="prefix", aggregate="geometric", high=CAP),
    }
    rules = {
        "reject turns": RejectRule(level="turn", **MEAN),
        "reject by prefix": RejectRule(level="prefix", **MEAN),
        "reject tv": RejectRule(level="token", stat="tv", high=0.1),
        "reject binary_kl": RejectRule(level="token", stat="binary_kl", high=0.1),
    }
    found = {name: CorrectionConfig(weight=weight) for name, weight in weights.items()}
    return found | {name: CorrectionConfig(reject=[rule]) for name, rule in rules.items()}


def multiples(batch: Batch, prox_N: Tensor, repeats: int) -> dict[str, float]:
    """The least time of each choice on one core, as a multiple of that of `tis`; waiting for a core
    does not count.
    """
    torch.set_num_threads(1)
    batch = replace(batch, turns_N=batch.responses.place_N // TURN_COLUMNS)
    times: dict[str, list[float]] = {name: [] for name in choices()}
    for _ in range(repeats):  # each once a round: what else the machine does meets all alike
        for name, config in choices().items():
            call = partial(rollout_correction, batch, prox_N, config)
            times[name] += seconds(call, 1, time.thread_time)
    return {name: round(min(found) / min(times["tis"]), 3) for name, found in times.items()}


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    values = torch.where(mask, values, 0.0)
    if dim is None:
        return values.sum() / mask.sum().clamp(min=1)
    return values.sum(dim=dim) / mask.sum(dim=dim).clamp(min=1)


def masked_std(values: Tensor, mask: Tensor) -> Tensor:
    mean = masked_mean(values, mask)
    return masked_mean((values - mean).square(), mask).clamp(min=0).sqrt()


def masked_max(values: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, values, -torch.inf).max()


def masked_min(values: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, values, torch.inf).min()


@torch.no_grad()
def plain(
    prox_BT: Tensor, sampler_BT: Tensor, mask_BT: Tensor
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """The definition of every quantity, each from the inputs, in the order of the specification."""
    sampler_ok_BT = torch.isfinite(sampler_BT)
    prox_ok_BT = torch.isfinite(prox_BT)
    found = {
        "non_finite_sampler": (mask_BT & ~sampler_ok_BT).sum(),
        "non_finite_learner": (mask_BT & ~prox_ok_BT).sum(),
    }
    mask_BT = mask_BT & sampler_ok_BT & prox_ok_BT
    d_BT = torch.where(mask_BT, prox_BT - sampler_BT, 0.0)
    prox_BT = torch.where(mask_BT, prox_BT, 0.0)
    sampler_BT = torch.where(mask_BT, sampler_BT, 0.0)
    rho_BT = d_BT.clamp(-20.0, 20.0).exp()

    geometric_B = masked_mean(d_BT, mask_BT, dim=1).clamp(-20.0, 20.0).exp()
    ok_B = (geometric_B >= LOW) & (geometric_B <= HIGH)
    kept_BT = mask_BT & ok_B[:, None]
    weights_BT = torch.where(kept_BT, rho_BT.clamp(max=CAP), 0.0)

    rows_B = mask_BT.any(dim=1)
    row_prox_B = masked_mean(prox_BT, mask_BT, dim=1)
    row_sampler_B = masked_mean(sampler_BT, mask_BT, dim=1)
    gap_B = row_sampler_B - row_prox_B
    found |= {
        "training_ppl": masked_mean((-row_prox_B).exp(), rows_B),
        "rollout_ppl": masked_mean((-row_sampler_B).exp(), rows_B),
        "log_ppl_diff": masked_mean(gap_B, rows_B),
        "log_ppl_abs_diff": masked_mean(gap_B.abs(), rows_B),
        "ppl_ratio": masked_mean(gap_B.exp(), rows_B),
        "kl": masked_mean(-d_BT, mask_BT),
        "logp_diff_mean": masked_mean(d_BT, mask_BT),
        "logp_diff_stderr": (d_BT - masked_mean(d_BT, mask_BT) * mask_BT).sum(dim=1).norm()
        / mask_BT.sum(),
        "k3_kl": masked_mean(rho_BT - 1.0 - d_BT, mask_BT),
        "chi2_token": masked_mean(rho_BT.square(), mask_BT) - 1.0,
        "chi2_seq": masked_mean((2.0 * d_BT.sum(dim=1)).clamp(-20.0, 20.0).exp(), rows_B) - 1.0,
    }
    found |= {
        "rollout_is_mean": masked_mean(weights_BT, kept_BT),
        "rollout_is_std": masked_std(weights_BT, kept_BT),
        "rollout_is_min": masked_min(weights_BT, kept_BT),
        "rollout_is_max": masked_max(weights_BT, kept_BT),
        "rollout_is_eff_sample_size": masked_mean(weights_BT, kept_BT).square()
        / masked_mean(weights_BT.square(), kept_BT),
        "rollout_is_ratio_fraction_high": masked_mean((rho_BT > CAP).float(), kept_BT),
        "rollout_is_ratio_fraction_low": masked_mean((rho_BT < 1.0 / CAP).float(), kept_BT),
        "rollout_rs_masked_fraction": masked_mean((~kept_BT).float(), mask_BT),
        "rollout_rs_seq_masked_fraction": masked_mean(
            (mask_BT & ~kept_BT).any(dim=1).float(), rows_B
        ),
    }
    prob_BT = prox_BT.exp()
    sampler_prob_BT = sampler_BT.exp()
    probs_diff_BT = (prob_BT - sampler_prob_BT).abs()
    logp_diff_BT = d_BT.abs()
    covariance = masked_mean(
        (prob_BT - masked_mean(prob_BT, mask_BT))
        * (sampler_prob_BT - masked_mean(sampler_prob_BT, mask_BT)),
        mask_BT,
    )
    found |= {
        "rho_mean": masked_mean(rho_BT, mask_BT),
        "rho_std": masked_std(rho_BT, mask_BT),
        "rho_min": masked_min(rho_BT, mask_BT),
        "rho_max": masked_max(rho_BT, mask_BT),
        "probs_diff_mean": masked_mean(probs_diff_BT, mask_BT),
        "probs_diff_max": masked_max(probs_diff_BT, mask_BT),
        "probs_diff_std": masked_std(probs_diff_BT, mask_BT),
        "probs_pearson_corr": covariance
        / (masked_std(prob_BT, mask_BT) * masked_std(sampler_prob_BT, mask_BT)),
        "logp_abs_diff_mean": masked_mean(logp_diff_BT, mask_BT),
        "logp_abs_diff_max": masked_max(logp_diff_BT, mask_BT),
        "logp_abs_diff_std": masked_std(logp_diff_BT, mask_BT),
        "mult_prob_error": masked_mean(logp_diff_BT.clamp(max=20.0).exp(), mask_BT),
    }
    return (
        weights_BT,
        kept_BT,
        {f"rollout_corr/{name}": float(value) for name, value in found.items()},
    )


def example(rows: int, columns: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Logprobs of sampled tokens, a mismatch of a few percent, responses of every length."""
    generator = torch.Generator().manual_seed(seed)
    sampler_BT = -torch.empty(rows, columns).exponential_(2.0, generator=generator)
    prox_BT = (sampler_BT + 0.05 * torch.randn(rows, columns, generator=generator)).clamp(max=0.0)
    lengths_B = torch.randint(columns // 4, columns + 1, (rows,), generator=generator)
    return prox_BT, sampler_BT, torch.arange(columns)[None, :] < lengths_B[:, None]


def batch_of(sampler_BT: Tensor, mask_BT: Tensor) -> Batch:
    """The responses, each to an empty prompt, without their padding."""
    zeros_B = torch.zeros(len(mask_BT), dtype=torch.int64)
    return Batch(
        prompt_lengths_B=zeros_B,
        response_lengths_B=mask_BT.sum(dim=1),
        groups_B=zeros_B,
        rewards_B=zeros_B,
        versions_B=zeros_B,
        tokens_P=torch.zeros(int(mask_BT.sum())),
        mask_N=mask_BT[mask_BT],
        sampler_logprobs_N=sampler_BT[mask_BT],
    )


def keep_freed_memory() -> None:
    """glibc hands freed memory back to the kernel and gets it again page by page; not here."""
    # mallopt's numbers for them
    trim_threshold = -1
    mmap_threshold = -3
    for parameter in (trim_threshold, mmap_threshold):
        ctypes.CDLL(None).mallopt(parameter, 1 << 30)


def seconds(
    call: Callable[[], object], repeats: int, clock: Callable[[], float] = time.perf_counter
) -> list[float]:
    """Times of repeated calls; the first two fill caches and the allocator's pools and are not
    counted.
    """
    found = []
    for turn in range(repeats + 2):
        start = clock()
        call()
        if turn >= 2:
            found.append(clock() - start)
    return found


def peak_bytes(call: Callable[[], object]) -> int:
    """The most memory that tensors made by `call` hold at one time, from the profiler's allocation
    events.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        kept_alive = call()
    del kept_alive
    held = peak = 0
    for event in sorted(trace.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--columns", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument(
        "--choices", action="store_true", help="time each choice as a multiple of tis"
    )
    arguments = parser.parse_args()
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    keep_freed_memory()
    prox_BT, sampler_BT, mask_BT = example(arguments.rows, arguments.columns)
    batch = batch_of(sampler_BT, mask_BT)
    prox_N = prox_BT[mask_BT]
    if arguments.choices:
        print(json.dumps(multiples(batch, prox_N, arguments.repeats), indent=2))
        return
    ours = lambda: rollout_correction(batch, prox_N, CONFIG)  # noqa: E731
    theirs = lambda: plain(prox_BT, sampler_BT, mask_BT)  # noqa: E731
    # alternate, so that a busy machine slows both alike
    ours_s = []
    theirs_s = []
    for _ in range(3):
        ours_s += seconds(ours, arguments.repeats // 3)
        theirs_s += seconds(theirs, arguments.repeats // 3)
    input_bytes = prox_BT.numel() * prox_BT.element_size()
    ours_median = statistics.median(ours_s)
    theirs_median = statistics.median(theirs_s)
    print(
        json.dumps(
            {
                "shape": [arguments.rows, arguments.columns],
                "threads": torch.get_num_threads(),
                "ours_ms": round(1e3 * ours_median, 2),
                "plain_ms": round(1e3 * theirs_median, 2),
                "time_ratio": round(ours_median / theirs_median, 3),
                "ours_peak_in_inputs": round(peak_bytes(ours) / input_bytes, 2),
                "plain_peak_in_inputs": round(peak_bytes(theirs) / input_bytes, 2),
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
