"""Rows of the table of metrics (`metrics.py`) about the mismatch of sampler and learner, and what
is done about it.
"""

from megatron_rl.config.schema import Format

PARTS = {  # of the compared tokens, and what they are
    **{str(format): f"tokens that {format} servers of a mixed fleet sampled" for format in Format},
    "fresh": "tokens of the learner's own policy version, in a step that has older ones too: numerics alone",
    "stale": "tokens of older versions: numerics, and what was learned since",
    "first_turn": "tokens of the first turn of each session (environment.name)",
    "middle_turns": "tokens of the turns between the first and the last",
    "last_turn": "tokens of the last turn, where it is not the first",
    "turn_start": "the first token of each turn, right behind what the engine has read",
    "turn_end": "the last token of each turn: its stop, where it was not cut",
    "text": "tokens of sessions that are neither thinking nor a tool call, where there are both kinds",
    "thinking": "tokens of thinking, its markers included",
    "tool_call": "tokens of tool calls, their markers included",
}

MISMATCH = (
    ("kl", "KL(sampler, learner), plain estimate: mean of -d", "mean", "nats"),
    ("k3_kl", "the same KL, never negative: mean of exp(d) - 1 - d", "mean", "nats"),
    ("chi2_token", "chi-squared divergence per token: mean of rho squared, minus 1"),
    ("chi2_seq", "chi-squared divergence per sequence: mean over rows of exp(2 sum d), minus 1"),
    ("training_ppl", "mean over rows of exp(-mean p): the learner's perplexity"),
    ("rollout_ppl", "mean over rows of exp(-mean mu): the same under the sampler"),
    (
        "log_ppl_diff",
        "mean over rows of -mean d: the difference of log perplexities",
        "mean",
        "nats",
    ),
    ("log_ppl_abs_diff", "mean over rows of abs(mean d)", "mean", "nats"),
    ("ppl_ratio", "mean over rows of exp(-mean d): the learner's perplexity over the sampler's"),
    (
        "rollout_is_mean",
        "mean of w, the weight that was applied, at kept tokens (level none: of rho)",
    ),
    ("rollout_is_std", "their standard deviation"),
    ("rollout_is_min", "the smallest of them", "min"),
    ("rollout_is_max", "the largest of them", "max"),
    (
        "rollout_is_eff_sample_size",
        "effective sample size (sum w)^2 / (n sum w^2) over n kept tokens",
    ),
    (
        "rollout_is_ratio_fraction_high",
        "raw ratios (rows for sequence weights) above weight.high or the solved cap",
    ),
    ("rollout_is_ratio_fraction_low", "fraction below weight.low (1/high where none is set)"),
    ("rollout_rs_masked_fraction", "1 - kept tokens / tokens before the rules"),
    ("rollout_rs_seq_masked_fraction", "fraction of sequences that lost a token to the rules"),
    (
        "stale_masked_fraction",
        "fraction of tokens rejected for their staleness, before other rules",
    ),
    (
        "rho_mean",
        "mean of the raw ratio; 1 in expectation where the engines sample what they report",
    ),
    ("rho_std", "its standard deviation"),
    ("rho_min", "the smallest raw ratio", "min"),
    ("rho_max", "the largest raw ratio", "max"),
    ("probs_diff_mean", "mean of abs(exp(p) - exp(mu)) over sampled tokens"),
    ("probs_diff_max", "the largest of them", "max"),
    ("probs_diff_std", "their standard deviation"),
    ("probs_pearson_corr", "correlation of exp(p) and exp(mu)"),
    (
        "logp_diff_mean",
        "mean of d, with its sign: a format that errs one way is off 0, noise is not",
        "mean",
        "nats",
    ),
    ("logp_diff_stderr", "its standard error over rows", "mean", "nats"),
    ("logp_abs_diff_mean", "mean of abs d", "mean", "nats"),
    ("logp_abs_diff_max", "the largest of them", "max", "nats"),
    ("logp_abs_diff_std", "their standard deviation", "mean", "nats"),
    ("mult_prob_error", "mean of exp(abs d): below 1.05 is healthy, above 1.1 is sick"),
    (
        "non_finite_sampler",
        "response tokens whose sampler logprob is NaN or infinite",
        "sum",
        "tokens",
    ),
    (
        "non_finite_learner",
        "response tokens whose learner logprob is NaN or infinite",
        "sum",
        "tokens",
    ),
    (
        "outside_support",
        "with rollout.top_k: fraction of trained tokens that the learner's own top_k and top_p "
        "would have cut",
    ),
    (
        "kept_log_mass",
        "with rollout.top_k: mean log of the learner's probability of what was kept; d would be "
        "off by it",
        "mean",
        "nats",
    ),
    ("cap", "largest cap in [1, weight.high] whose sample size reaches weight.target_ess"),
    (
        "mix",
        "largest a in [0, 1] of weights 1 + a (w - 1) whose sample size does, with "
        "weight.target_by mix",
    ),
    ("weight_bias", "mean(w A) - mean(rho A) over kept tokens: what the bounds cost in bias"),
    ("weight_variance", "var(w A) / n over kept tokens"),
)
