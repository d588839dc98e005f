"""The one table of metrics: every name a run may log, how its parts combine, its unit, its meaning.

`docs/metrics.md` is this table, printed by `python -m megatron_rl.runs.metrics > docs/metrics.md`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from megatron_rl.config.schema import Format
from megatron_rl.runs import eval_metrics

GROUPS: dict[str, str] = {
    "progress": "How far the run is.",
    "reward": "What the answers scored. The policy that is scored is the *sampler's*: see `reward/learner_estimate`.",
    "eval": "What the sampler answers on data.eval; a named set has `eval/NAME/accuracy` and so on.",
    "rollout": "What was generated.",
    "rollout_corr": (
        "How far the sampler and the learner disagree, and what the correction did about it. Names that verl also "
        "has mean the same thing here. p and mu are the learner's and the sampler's logprob of a sampled token, "
        "d = p - mu, rho = exp(d); A the advantage. Every exponent is clamped to [-20, 20]. With correction.anchor: "
        "sampler only means over tokens are logged, with the policy's own logprob for p."
    ),
    "loss": "The policy loss of the learner. With several minibatches per step: their mean.",
    "optim": "The optimizer.",
    "sync": "Handing the new weights to the sampler.",
    "time": (
        "Wall-clock seconds of a step on the driver rank. `time/step` is the whole; the phases do not overlap and "
        "add up to it together with `time/other`."
    ),
    "perf": "Throughput.",
}

PARTS = {  # of the compared tokens, and what they are
    **{str(format): f"tokens that {format} servers of a mixed fleet sampled" for format in Format},
    "fresh": "tokens of the learner's own policy version, in a step that has older ones too: numerics alone",
    "stale": "tokens of older versions: numerics, and what was learned since",
}

REDUCERS: dict[str, Callable[[Sequence[float]], float]] = {
    "mean": lambda values: math.fsum(values) / len(values) if all(map(math.isfinite, values)) else sum(values),
    "sum": sum,
    "min": lambda values: math.nan if any(map(math.isnan, values)) else min(values),
    "max": lambda values: math.nan if any(map(math.isnan, values)) else max(values),
    "last": lambda values: values[-1],
}


class UnknownMetricWarning(UserWarning):
    """A name that is not in the table was logged. Tests turn this into an error."""


@dataclass(frozen=True)
class Metric:
    name: str
    reducer: str  # over the parts of one step: minibatches, generation calls
    unit: str
    meaning: str

    @property
    def group(self) -> str:
        return self.name.split("/", 1)[0]


def _rows(group: str, *rows: tuple[str, str, str, str]) -> list[Metric]:
    return [Metric(f"{group}/{name}", reducer, unit, meaning) for name, reducer, unit, meaning in rows]


_TABLE: list[Metric] = [
    *_rows(
        "progress",
        ("step", "last", "", "optimizer steps on rollout batches finished; 0 is before training"),
        ("samples", "last", "rollouts", "rollouts trained on since the start"),
        ("tokens", "last", "tokens", "response tokens trained on since the start"),
        ("elapsed_s", "last", "s", "wall clock since the start of this attempt"),
    ),
    *_rows(
        "reward",
        ("mean", "mean", "", "mean reward of the rollouts trained on, after the group filter"),
        ("std", "mean", "", "their standard deviation"),
        ("min", "min", "", "the lowest of them"),
        ("max", "max", "", "the highest of them"),
        ("sampler_mean", "mean", "", "mean reward of all generated rollouts, before the group filter"),
        (
            "learner_estimate",
            "mean",
            "",
            "sum v R / sum v over all generated rollouts, v = exp(sum d): the mean under the learner",
        ),
        ("learner_estimate_stderr", "mean", "", "its standard error: root of sum v^2 (R - estimate)^2, over sum v"),
        ("right", "sum", "rollouts", "generated rollouts that are right (a function of one's own: a score of 1)"),
        ("wrong", "sum", "rollouts", "those whose answer is not, truncated ones included"),
        ("no_answer", "sum", "rollouts", "those in which the verifier found no answer, worth as much as a wrong one"),
        ("errors", "sum", "rollouts", "those without a reward (an exception, a death, a timeout), not trained on"),
        ("timeouts", "sum", "rollouts", "those of them that took too long"),
        ("own/*", "mean", "", "mean of a number that a reward of one's own gave beside its score, by its name"),
        ("part/*", "mean", "", "mean score of each reward, before its weight, where reward.name has several"),
    ),
    *_rows("eval", *eval_metrics.ROWS),
    *_rows(
        "rollout",
        ("n", "sum", "rollouts", "rollouts generated, those of dropped groups included"),
        ("n_trained", "sum", "rollouts", "rollouts in the batch that was trained on"),
        ("trained_tokens", "sum", "tokens", "prompt and response tokens of that batch"),
        ("prompt_tokens", "sum", "tokens", "prompt tokens given to the sampler"),
        ("tokens", "sum", "tokens", "response tokens generated"),
        ("prompt_tokens_mean", "mean", "tokens", "mean prompt length"),
        ("response_tokens_mean", "mean", "tokens", "mean response length"),
        ("response_tokens_min", "min", "tokens", "the shortest response"),
        ("response_tokens_max", "max", "tokens", "the longest response"),
        ("truncated_fraction", "mean", "", "fraction of responses cut at the length limit"),
        ("aborted_fraction", "mean", "", "fraction of responses that the sampler gave up on"),
        ("logprobs_missing", "sum", "tokens", "sampled tokens whose logprob came back missing or NaN"),
        ("gen_batches", "sum", "calls", "generation calls that were needed to fill the batch"),
        ("groups", "sum", "groups", "groups generated"),
        ("groups_kept", "sum", "groups", "groups with spread in their rewards, which can be learned from"),
        ("groups_kept_fraction", "mean", "", "groups kept over groups generated"),
        ("groups_all_right", "sum", "groups", "groups all of whose answers are right (a reward of 1)"),
        ("groups_all_wrong", "sum", "groups", "groups in which every answer has the same lower reward"),
        ("staleness_mean", "mean", "versions", "mean number of updates between a rollout's policy and the learner"),
        ("staleness_max", "max", "versions", "the largest of those numbers"),
        ("spanning_fraction", "mean", "", "fraction of rollouts that an update came into the middle of"),
        ("ready_ahead", "mean", "batches", "whole batches that were waiting when this one was taken (rollout.ahead)"),
        ("seconds", "sum", "s", "from the batch's first prompt to its last answer, while the learner worked too"),
        ("dropped", "sum", "rollouts", "those that had become too old and were drawn again (rollout.stale: drop)"),
        ("retried", "sum", "prompts", "prompts that another server of the fleet had to answer, because one had gone"),
        ("restarts", "sum", "engines", "engines, or servers of the fleet, that were started again"),
    ),
    *_rows(
        "rollout_corr",
        ("kl", "mean", "nats", "KL(sampler, learner), plain estimate: mean of -d"),
        ("k3_kl", "mean", "nats", "the same KL, never negative: mean of exp(d) - 1 - d"),
        ("chi2_token", "mean", "", "chi-squared divergence per token: mean of rho squared, minus 1"),
        ("chi2_seq", "mean", "", "chi-squared divergence per sequence: mean over rows of exp(2 sum d), minus 1"),
        ("training_ppl", "mean", "", "mean over rows of exp(-mean p): the learner's perplexity"),
        ("rollout_ppl", "mean", "", "mean over rows of exp(-mean mu): the same under the sampler"),
        ("log_ppl_diff", "mean", "nats", "mean over rows of -mean d: the difference of log perplexities"),
        ("log_ppl_abs_diff", "mean", "nats", "mean over rows of abs(mean d)"),
        ("ppl_ratio", "mean", "", "mean over rows of exp(-mean d): the learner's perplexity over the sampler's"),
        ("rollout_is_mean", "mean", "", "mean of w, the weight that was applied, at kept tokens (level none: of rho)"),
        ("rollout_is_std", "mean", "", "their standard deviation"),
        ("rollout_is_min", "min", "", "the smallest of them"),
        ("rollout_is_max", "max", "", "the largest of them"),
        ("rollout_is_eff_sample_size", "mean", "", "effective sample size (sum w)^2 / (n sum w^2) over n kept tokens"),
        (
            "rollout_is_ratio_fraction_high",
            "mean",
            "",
            "raw ratios (rows for sequence weights) above weight.high or the solved cap",
        ),
        ("rollout_is_ratio_fraction_low", "mean", "", "fraction below weight.low (1/high where none is set)"),
        ("rollout_rs_masked_fraction", "mean", "", "1 - kept tokens / tokens before the rules"),
        ("rollout_rs_seq_masked_fraction", "mean", "", "fraction of sequences that lost a token to the rules"),
        ("stale_masked_fraction", "mean", "", "fraction of tokens rejected for their staleness, before other rules"),
        ("rho_mean", "mean", "", "mean of the raw ratio; 1 in expectation where the engines sample what they report"),
        ("rho_std", "mean", "", "its standard deviation"),
        ("rho_min", "min", "", "the smallest raw ratio"),
        ("rho_max", "max", "", "the largest raw ratio"),
        ("probs_diff_mean", "mean", "", "mean of abs(exp(p) - exp(mu)) over sampled tokens"),
        ("probs_diff_max", "max", "", "the largest of them"),
        ("probs_diff_std", "mean", "", "their standard deviation"),
        ("probs_pearson_corr", "mean", "", "correlation of exp(p) and exp(mu)"),
        (
            "logp_diff_mean",
            "mean",
            "nats",
            "mean of d, with its sign: a format that errs one way is off 0, noise is not",
        ),
        ("logp_diff_stderr", "mean", "nats", "its standard error over rows"),
        ("logp_abs_diff_mean", "mean", "nats", "mean of abs d"),
        ("logp_abs_diff_max", "max", "nats", "the largest of them"),
        ("logp_abs_diff_std", "mean", "nats", "their standard deviation"),
        ("mult_prob_error", "mean", "", "mean of exp(abs d): below 1.05 is healthy, above 1.1 is sick"),
        ("non_finite_sampler", "sum", "tokens", "response tokens whose sampler logprob is NaN or infinite"),
        ("non_finite_learner", "sum", "tokens", "response tokens whose learner logprob is NaN or infinite"),
        (
            "outside_support",
            "mean",
            "",
            "with rollout.top_k: fraction of trained tokens that the learner's own top_k and top_p would have cut",
        ),
        (
            "kept_log_mass",
            "mean",
            "nats",
            "with rollout.top_k: mean log of the learner's probability of what was kept; d would be off by it",
        ),
        ("cap", "mean", "", "largest cap in [1, weight.high] whose sample size reaches weight.target_ess"),
        ("weight_bias", "mean", "", "mean(w A) - mean(rho A) over kept tokens: what the bounds cost in bias"),
        ("weight_variance", "mean", "", "var(w A) / n over kept tokens"),
    ),
    *(
        row
        for part, tokens in PARTS.items()
        for row in _rows(
            f"rollout_corr/{part}",
            ("kl", "mean", "nats", f"kl at {tokens}"),
            ("k3_kl", "mean", "nats", "k3_kl at the same tokens"),
            ("logp_abs_diff_mean", "mean", "nats", "logp_abs_diff_mean at the same tokens"),
            ("mult_prob_error", "mean", "", "mult_prob_error at the same tokens"),
            ("token_fraction", "mean", "", "their share of the compared tokens"),
        )
    ),
    *_rows(
        "loss",
        ("total", "mean", "", "the loss whose gradient was taken"),
        ("policy", "mean", "", "its policy-gradient part; the cross entropy in a supervised warm start"),
        ("kl", "mean", "nats", "the KL to the reference policy, before its coefficient"),
        ("entropy", "mean", "nats", "mean entropy of the policy at trained tokens"),
        ("clip_fraction_high", "mean", "", "fraction of tokens at which the upper clip is active"),
        ("clip_fraction_low", "mean", "", "fraction of tokens at which the lower clip is active"),
        ("dual_clip_fraction", "mean", "", "fraction of tokens at which the dual clip is active"),
        ("approx_kl", "mean", "nats", "k1 estimate of KL(anchor, current policy): how far this step has moved"),
        ("ratio_mean", "mean", "", "mean ratio of the current policy and the anchor"),
        ("selected_fraction", "mean", "", "fraction of tokens that a covariance loss singled out"),
        ("trained_fraction", "mean", "", "tokens trained on, of those in the denominator"),
        ("empty_microbatches", "sum", "", "micro-batches without a token to train on"),
    ),
    *_rows(
        "optim",
        ("lr", "last", "", "learning rate of the last update"),
        ("grad_norm", "mean", "", "gradient norm before clipping"),
        ("clipped", "mean", "", "fraction of updates whose gradient was clipped"),
        ("skipped", "sum", "updates", "updates skipped because the loss or the gradient was not finite"),
        ("updates", "sum", "updates", "optimizer updates; a minibatch without tokens to train on makes none"),
    ),
    *_rows(
        "sync",
        ("version", "last", "", "policy version that was sent"),
        ("bytes", "sum", "bytes", "bytes that were sent"),
        ("tensors", "last", "", "tensors that were sent"),
        ("resent", "sum", "", "versions that were sent a second time, because the first was refused or not written"),
        ("refused", "sum", "", "versions that the sampler refused, and the run went on without (rollout.ahead)"),
        ("changed_fraction", "mean", "", "values that differ from the version before, with sync.full_every above 1"),
        ("plan_s", "sum", "s", "deciding what goes where"),
        ("quantize_s", "sum", "s", "quantizing on the shards, row maxima over tensor-parallel ranks included"),
        ("gather_s", "sum", "s", "gathering over the tensor-parallel group"),
        ("transfer_s", "sum", "s", "moving the buckets to the sampler"),
        ("load_s", "sum", "s", "loading and verifying in the sampler"),
        ("total_s", "sum", "s", "the whole sync as the driver sees it"),
        ("quant_error_max", "max", "", "largest relative quantization error over the layers"),
        ("quant_error_mean", "mean", "", "mean relative quantization error over the layers"),
        ("clamped_fraction", "mean", "", "fraction of weight values beyond what their scale can express"),
        ("probe_abs_diff", "last", "nats", "mean absolute logprob difference on freshly sampled tokens, right after"),
        ("probe_diff", "last", "nats", "the same with its sign, learner less sampler"),
        ("probe_floor", "last", "nats", "the same if the sampler held BF16 weights (hosts; BF16, INT8 and FP8)"),
        ("probe_floor_diff", "last", "nats", "that with its sign"),
        ("probe_over_floor", "last", "", "probe_abs_diff over probe_floor: 1 is as good as BF16"),
        ("probe_budget", "last", "nats", "what that difference may be for this pair of formats"),
        ("probe_noise", "last", "nats", "what one rounding more of its weights does to the learner's own logprobs"),
        (
            "router_flips",
            "last",
            "",
            "share of tokens, over all layers, whose experts differ in learner and engine (hosts)",
        ),
        ("router_flips/*", "last", "", "the same of one layer"),
        *(
            (f"probe_abs_diff/{format}", "last", "nats", f"the same for {format} servers of a mixed fleet alone")
            for format in Format
        ),
        ("probe_layer_error", "last", "", "sync.probe_layers: largest difference of a block, as a share of its size"),
    ),
    *_rows(
        "time",
        ("step", "sum", "s", "the whole step"),
        ("rollout", "sum", "s", "generating, scoring and refilling groups"),
        ("prox", "sum", "s", "the learner's forward passes before the update: proximal logprobs, reference"),
        ("correction", "sum", "s", "rollout_correction, advantages and denominators"),
        ("update", "sum", "s", "forward, backward and optimizer"),
        ("sync", "sum", "s", "weight sync, probe included"),
        ("eval", "sum", "s", "evaluation on the held-out split"),
        ("record", "sum", "s", "writing rollouts and metrics"),
        ("checkpoint", "sum", "s", "copying the state that a thread then writes, after the step before"),
        ("other", "sum", "s", "what no phase claims"),
    ),
    *_rows(
        "perf",
        (
            "rollout_tokens_per_s",
            "mean",
            "tokens/s",
            "response tokens over time/rollout, or rollout/seconds if there are",
        ),
        ("sync_fraction", "mean", "", "weight sync as a fraction of the step"),
        ("tokens_per_s_per_device", "mean", "tokens/s", "response tokens over time/step and the run's devices"),
        ("update_tflops_per_device", "mean", "TFLOP/s", "operations of an update, forward and backward, over its time"),
        ("update_mfu", "mean", "", "the same over the peak of the device in BF16, where its kind is known"),
        (
            "prox_saved_s",
            "sum",
            "s",
            "the forward pass inside the only update, which spared the one for the proximal logprobs",
        ),
        ("host_memory_gib", "max", "GiB", "the most that rank 0 has held in host memory so far"),
        ("device_memory_gib", "max", "GiB", "the most that rank 0 has held on its GPU so far"),
    ),
]

METRICS: dict[str, Metric] = {metric.name: metric for metric in _TABLE}


def row(name: str) -> Metric | None:
    """Its own, or that of all names of its kind."""
    kinds = (name, f"{name.rpartition('/')[0]}/*", eval_metrics.row_name(name))
    return next((METRICS[kind] for kind in kinds if kind in METRICS), None)


def unknown(names: Iterable[str]) -> list[str]:
    return sorted(name for name in names if row(name) is None)


def combine(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """One value per name from the parts of a step. A part may lack a name; an unknown name is averaged."""
    values: dict[str, list[float]] = {}
    for part in parts:
        for name, value in part.items():
            values.setdefault(name, []).append(value)
    reducers = {name: found.reducer if (found := row(name)) else "mean" for name in values}
    return {name: REDUCERS[reducers[name]](v) for name, v in values.items()}


def markdown() -> str:
    lines = [
        "# Metrics",
        "",
        "Every name that a run may log, to `metrics.jsonl`, W&B and the report. This page is generated from the table",
        "in `megatron_rl/runs/metrics.py`: `python -m megatron_rl.runs.metrics > docs/metrics.md`.",
        "",
        "*parts* says how the values of a step's parts (minibatches, generation calls) become one.",
    ]
    for group, about in GROUPS.items():
        lines += ["", f"## {group}/", "", about, "", "| name | unit | parts | meaning |", "|---|---|---|---|"]
        lines += [
            f"| `{metric.name}` | {metric.unit} | {metric.reducer} | {metric.meaning} |"
            for metric in _TABLE
            if metric.group == group
        ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(markdown())
