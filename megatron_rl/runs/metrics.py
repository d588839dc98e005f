"""The one table of metrics: every name a run may log, how its parts are combined, unit, meaning;
look-ups by name.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from megatron_rl.config.schema import Format
from megatron_rl.runs.mismatch_metrics import MISMATCH, PARTS

ACCURACY = "eval/accuracy"
_OF_A_SET = re.compile(r"eval/(?:([\w-]+)/)?([a-z_]+)(@\d+)?(_stderr)?")


class UnknownMetricWarning(UserWarning):
    """A name that is not in the table was logged. Tests turn this into an error."""


@dataclass(frozen=True)
class Metric:
    name: str
    meaning: str
    reducer: str = "mean"  # over the parts of one step: minibatches, generation calls
    unit: str = ""


METRICS: dict[str, Metric] = {}


def _group(group: str, *rows: tuple[str, ...]) -> None:
    """Adds rows of a name and its meaning, then its reducer and its unit where they are not "mean"
    and none.
    """
    METRICS.update({f"{group}/{name}": Metric(f"{group}/{name}", *rest) for name, *rest in rows})


_group(
    "progress",
    ("step", "optimizer steps on rollout batches finished; 0 is before training", "last"),
    ("samples", "rollouts trained on since the start", "last", "rollouts"),
    ("tokens", "response tokens trained on since the start", "last", "tokens"),
    ("elapsed_s", "wall clock since the start of this attempt", "last", "s"),
    ("failed_saves", "checkpoints in a row that were not saved, once there was one", "last"),
)
_group(
    "reward",
    ("mean", "mean reward of the rollouts trained on, after the group filter"),
    ("std", "their standard deviation"),
    ("min", "the lowest of them", "min"),
    ("max", "the highest of them", "max"),
    ("sampler_mean", "mean reward of all generated rollouts, before the group filter"),
    (
        "learner_estimate",
        "sum v R / sum v over all generated rollouts, v = exp(sum d): the mean under the learner",
    ),
    ("learner_estimate_stderr", "its standard error: root of sum v^2 (R - estimate)^2, over sum v"),
    (
        "right",
        "generated rollouts that are right (a function of one's own: a score of 1)",
        "sum",
        "rollouts",
    ),
    ("wrong", "those whose answer is not, truncated ones included", "sum", "rollouts"),
    (
        "no_answer",
        "those in which the verifier found no answer, worth as much as a wrong one",
        "sum",
        "rollouts",
    ),
    (
        "errors",
        "those without a reward (an exception, a death, a timeout), not trained on",
        "sum",
        "rollouts",
    ),
    ("timeouts", "those of them that took too long", "sum", "rollouts"),
    ("own/*", "mean of a number that a reward of one's own gave beside its score, by its name"),
    ("part/*", "mean score of each reward, before its weight, where reward.name has several"),
)
_group(
    "eval",  # of each set
    ("accuracy", "avg@k: fraction of the answers that are right, mean over the prompts", "last"),
    ("accuracy_stderr", "its standard error, clustered by prompt, as are those below", "last"),
    (
        "pass@K",
        "fraction of prompts of which K answers hold a right one, unbiased (K: 2, 4, ... samples)",
        "last",
    ),
    ("pass@K_stderr", "its standard error", "last"),
    (
        "maj@K",
        "fraction of prompts whose most frequent answer is right; ties count in part (K: samples)",
        "last",
    ),
    ("maj@K_stderr", "its standard error", "last"),
    ("reward_mean", "mean reward on the held-out prompts", "last"),
    ("n", "held-out prompts that were answered", "last", "prompts"),
    ("response_tokens_mean", "mean length of those answers", "last", "tokens"),
    ("truncated_fraction", "fraction of them cut at the length limit", "last"),
    ("no_answer_fraction", "fraction of them in which the verifier found no answer", "last"),
    (
        "errors",
        "those without a score (an exception, a death, a timeout), which count as wrong",
        "last",
        "rollouts",
    ),
)
_group(
    "rollout",
    ("n", "rollouts generated, those of dropped groups included", "sum", "rollouts"),
    ("n_trained", "rollouts in the batch that was trained on", "sum", "rollouts"),
    ("trained_tokens", "prompt and response tokens of that batch", "sum", "tokens"),
    ("prompt_tokens", "prompt tokens given to the sampler", "sum", "tokens"),
    ("tokens", "response tokens generated", "sum", "tokens"),
    ("prompt_tokens_mean", "mean prompt length", "mean", "tokens"),
    ("response_tokens_mean", "mean response length", "mean", "tokens"),
    ("response_tokens_min", "the shortest response", "min", "tokens"),
    ("response_tokens_max", "the longest response", "max", "tokens"),
    ("truncated_fraction", "fraction of responses cut at the length limit"),
    ("aborted_fraction", "fraction of responses that the sampler gave up on"),
    ("logprobs_missing", "sampled tokens whose logprob came back missing or NaN", "sum", "tokens"),
    ("gen_batches", "generation calls that were needed to fill the batch", "sum", "calls"),
    ("groups", "groups generated", "sum", "groups"),
    (
        "groups_kept",
        "groups with spread in their rewards, which can be learned from",
        "sum",
        "groups",
    ),
    ("groups_kept_fraction", "groups kept over groups generated"),
    ("groups_all_right", "groups all of whose answers are right (a reward of 1)", "sum", "groups"),
    ("groups_all_wrong", "groups in which every answer has the same lower reward", "sum", "groups"),
    (
        "staleness_mean",
        "mean number of updates between a rollout's policy and the learner",
        "mean",
        "versions",
    ),
    ("staleness_max", "the largest of those numbers", "max", "versions"),
    ("spanning_fraction", "fraction of rollouts that an update came into the middle of"),
    (
        "ready_ahead",
        "whole batches that were waiting when this one was taken (rollout.ahead)",
        "mean",
        "batches",
    ),
    (
        "seconds",
        "from the batch's first prompt to its last answer, while the learner worked too",
        "sum",
        "s",
    ),
    (
        "dropped",
        "those that had become too old and were drawn again (rollout.stale: drop)",
        "sum",
        "rollouts",
    ),
    (
        "retried",
        "prompts that another server of the fleet had to answer, because one had gone",
        "sum",
        "prompts",
    ),
    ("restarts", "engines, or servers of the fleet, that were started again", "sum", "engines"),
)
_group(
    "session",
    ("turns_mean", "mean answers of a session (environment.name)", "mean", "turns"),
    ("turns_max", "answers of the longest one", "max", "turns"),
    ("turn_tokens_mean", "mean tokens of an answer", "mean", "tokens"),
    ("turns_cut_fraction", "fraction of answers that were cut by their length"),
    ("tool_calls", "tool calls that were made", "sum", "calls"),
    (
        "tool_calls_failed",
        "those that raised, were late, or had wrong arguments: the policy reads why",
        "sum",
        "calls",
    ),
    ("tool_calls_late", "those that were stopped at environment.tool_timeout_s", "sum", "calls"),
    ("tool_calls_unread", "answers that began a call which could not be read", "sum", "answers"),
    (
        "tool_seconds_mean",
        "mean seconds from an answer to what follows it: tools, or step",
        "mean",
        "s",
    ),
    ("observations_cut", "messages cut to environment.observation_tokens", "sum", "messages"),
    (
        "answers_unread",
        "answers that an agent gave up before it had them: not trained on",
        "sum",
        "answers",
    ),
    (
        "forks",
        "times that a conversation did not go on behind its exact tokens: a row more each",
        "sum",
        "forks",
    ),
    ("restarts", "sessions begun again after their environment failed", "sum", "sessions"),
    ("errors", "sessions that failed twice: they are not trained on", "sum", "sessions"),
    ("out_of_turns_fraction", "fraction of sessions that ended at environment.turns"),
    (
        "refused_fraction",
        "fraction of sessions that ended as the chat template took them no further",
    ),
    ("out_of_context_fraction", "fraction of sessions that ended at a limit of tokens"),
)
for turn in range(4):
    _group(
        f"session/turn_{turn}",
        ("sessions", f"turn {turn}, counted from 0: sessions that came to it", "sum", "sessions"),
        (
            "tokens_mean",
            f"turn {turn}, counted from 0: mean tokens of its answer",
            "mean",
            "tokens",
        ),
        (
            "tool_seconds_mean",
            f"turn {turn}, counted from 0: mean seconds to what followed",
            "mean",
            "s",
        ),
        ("reward_mean", f"turn {turn}, counted from 0: mean reward that it was given"),
    )
_group("rollout_corr", *MISMATCH)
for part, tokens in PARTS.items():
    _group(
        f"rollout_corr/{part}",
        ("kl", f"kl at {tokens}", "mean", "nats"),
        ("k3_kl", "k3_kl at the same tokens", "mean", "nats"),
        ("logp_abs_diff_mean", "logp_abs_diff_mean at the same tokens", "mean", "nats"),
        ("mult_prob_error", "mult_prob_error at the same tokens"),
        ("token_fraction", "their share of the compared tokens"),
    )
_group(
    "loss",
    ("total", "the loss whose gradient was taken"),
    ("policy", "its policy-gradient part; the cross entropy in a supervised warm start"),
    ("kl", "the KL to the reference policy, before its coefficient", "mean", "nats"),
    ("entropy", "mean entropy of the policy at the tokens that come to the loss", "mean", "nats"),
    ("clip_fraction_high", "fraction of tokens at which the upper clip is active"),
    ("clip_fraction_low", "fraction of tokens at which the lower clip is active"),
    ("dual_clip_fraction", "fraction of tokens at which the dual clip is active"),
    (
        "approx_kl",
        "k1 estimate of KL(anchor, current policy): how far this step has moved",
        "mean",
        "nats",
    ),
    ("ratio_mean", "mean ratio of the current policy and the anchor"),
    ("selected_fraction", "fraction of tokens that a covariance loss singled out"),
    ("trained_fraction", "tokens trained on, of those in the denominator"),
    ("empty_microbatches", "micro-batches without a token to train on", "sum"),
)
_group(
    "optim",
    ("lr", "learning rate of the last update", "last"),
    ("grad_norm", "gradient norm before clipping"),
    ("clipped", "fraction of updates whose gradient was clipped"),
    (
        "skipped",
        "updates skipped because the loss or the gradient was not finite",
        "sum",
        "updates",
    ),
    (
        "updates",
        "optimizer updates; a minibatch without tokens to train on makes none",
        "sum",
        "updates",
    ),
)
_group(
    "router",
    (
        "replayed",
        "learner.router=replay: share of the tokens read in updates that went to the sampler's "
        "experts",
    ),
    ("replayed/*", "the same of one layer"),
    ("flips", "share of those that the learner's routers would have sent elsewhere"),
    ("flips/*", "the same of one layer"),
)
_group(
    "sync",
    ("version", "policy version that was sent", "last"),
    ("bytes", "bytes that were sent", "sum", "bytes"),
    ("read_bytes", "bytes of it that one rank of an engine read", "sum", "bytes"),
    ("tensors", "tensors that were sent", "last"),
    (
        "resent",
        "versions that were sent a second time, because the first was refused or not written",
        "sum",
    ),
    (
        "refused",
        "versions that the sampler refused, and the run went on without (rollout.ahead)",
        "sum",
    ),
    (
        "changed_fraction",
        "values that differ from the version before, with sync.full_every above 1",
    ),
    ("plan_s", "deciding what goes where", "sum", "s"),
    (
        "quantize_s",
        "quantizing on the shards, row maxima over tensor-parallel ranks included",
        "sum",
        "s",
    ),
    ("gather_s", "gathering over the tensor-parallel group", "sum", "s"),
    ("transfer_s", "moving the buckets to the sampler", "sum", "s"),
    ("load_s", "loading and verifying in the sampler", "sum", "s"),
    ("pause_s", "the part of it in which no engine answers", "sum", "s"),
    ("total_s", "the whole sync as the driver sees it", "sum", "s"),
    ("quant_error_max", "largest relative quantization error over the layers", "max"),
    ("quant_error_mean", "mean relative quantization error over the layers"),
    ("clamped_fraction", "fraction of weight values beyond what their scale can express"),
    (
        "probe_abs_diff",
        "mean absolute logprob difference on freshly sampled tokens, right after",
        "last",
        "nats",
    ),
    ("probe_diff", "the same with its sign, learner less sampler", "last", "nats"),
    (
        "probe_floor",
        "the same if the sampler held BF16 weights (hosts; BF16, INT8 and FP8)",
        "last",
        "nats",
    ),
    ("probe_floor_diff", "that with its sign", "last", "nats"),
    ("probe_over_floor", "probe_abs_diff over probe_floor: 1 is as good as BF16", "last"),
    ("probe_budget", "what that difference may be for this pair of formats", "last", "nats"),
    (
        "probe_expected",
        "what rounding as the sampler's format does changes of the learner's own",
        "last",
        "nats",
    ),
    (
        "probe_unexplained",
        "what is left of the difference then (BF16 learners on hosts)",
        "last",
        "nats",
    ),
    (
        "probe_noise",
        "what one rounding more of its weights does to the learner's own logprobs",
        "last",
        "nats",
    ),
    (
        "router_flips",
        "share of tokens, over all layers, whose experts differ in learner and engine (hosts)",
        "last",
    ),
    ("router_flips/*", "the same of one layer", "last"),
    *(
        (
            f"probe_abs_diff/{format}",
            f"the same for {format} servers of a mixed fleet alone",
            "last",
            "nats",
        )
        for format in Format
    ),
)
_group(
    "time",
    ("step", "the whole step", "sum", "s"),
    ("rollout", "generating, scoring and refilling groups", "sum", "s"),
    (
        "prox",
        "the learner's forward passes before the update: proximal logprobs, reference",
        "sum",
        "s",
    ),
    ("correction", "rollout_correction, advantages and denominators", "sum", "s"),
    ("update", "forward, backward and optimizer", "sum", "s"),
    ("sync", "weight sync, probe included", "sum", "s"),
    ("eval", "evaluation on the held-out split", "sum", "s"),
    ("record", "writing rollouts and metrics", "sum", "s"),
    (
        "checkpoint",
        "copying the state that a thread then writes, after the step before",
        "sum",
        "s",
    ),
    ("other", "what no phase claims", "sum", "s"),
)
_group(
    "perf",
    (
        "rollout_tokens_per_s",
        "response tokens over time/rollout, or rollout/seconds if there are",
        "mean",
        "tokens/s",
    ),
    ("sync_fraction", "weight sync as a fraction of the step"),
    (
        "tokens_per_s_per_device",
        "response tokens over time/step and the run's devices",
        "mean",
        "tokens/s",
    ),
    (
        "update_tflops_per_device",
        "operations of an update, forward and backward, over its time",
        "mean",
        "TFLOP/s",
    ),
    ("update_mfu", "the same over the peak of the device in BF16, where its kind is known"),
    (
        "prox_saved_s",
        "the forward pass inside the only update, which spared the one for the proximal logprobs",
        "sum",
        "s",
    ),
    ("host_memory_gib", "the most that rank 0 has held in host memory so far", "max", "GiB"),
    ("device_memory_gib", "the most that rank 0 has held on its GPU so far", "max", "GiB"),
)


def row(name: str) -> Metric | None:
    """The row of a name, or of all names of its kind."""
    kinds = (name, f"{name.rpartition('/')[0]}/*", eval_row(name))
    return next((METRICS[kind] for kind in kinds if kind in METRICS), None)


def eval_row(name: str) -> str:
    """eval/aime/pass@8 -> eval/pass@K: of any set, and any number of samples."""
    found = _OF_A_SET.fullmatch(name)
    if found is None:
        return name
    return f"eval/{found[2]}{'@K' if found[3] else ''}{found[4] or ''}"


def accuracies(names: Iterable[str]) -> dict[str, str]:
    """Metric -> name of the set, for all sets that were evaluated; data.eval first."""
    found = {name: _OF_A_SET.fullmatch(name) for name in names}
    sets = {
        name: match[1] or "eval"
        for name, match in found.items()
        if match and eval_row(name) == ACCURACY
    }
    return dict(sorted(sets.items(), key=lambda item: (item[0] != ACCURACY, item[0])))


def unknown(names: Iterable[str]) -> list[str]:
    return sorted(name for name in names if row(name) is None)
