"""Score centering: subtracts from each token's gradient what the sampler would be expected to give
at its prefix (arXiv 2609.20807). At a prefix, the expected gradient of a loss under the sampler is
E[A] E[c grad log pi] and the covariance of the two; the first part, the drift, pulls the policy
towards its sampler, independently of rewards.

q: the sampler's probabilities, p: the proximal policy's; c: what a loss multiplies A grad log pi by,
the weight included. The tail, whose tokens are unknown, is taken to be proportional to pi.

A clip by the sign of the advantage is not in c. It keeps pi near its anchor: a clipped token gives no
gradient, and those of the others pull it back. To subtract the expectation of that undoes the clip.

Shape legend: N response tokens, E top tokens at all tokens, V top tokens, then tails: E + N.
"""

import math

import torch
from torch import Tensor

from megatron_rl.batch import UpdateInputs
from megatron_rl.config.schema import LossConfig
from megatron_rl.loss.table import LOSSES
from megatron_rl.loss.terms import Terms
from megatron_rl.rollout_correction.ratio import bounded_exp
from megatron_rl.rollout_correction.top_logprobs import TopLogprobs
from megatron_rl.segments import Segments
from megatron_rl.types import Metrics

SMALLEST_NORM = 1e-30
CENTERED_FRACTION = "center/token_fraction"
# means over centered tokens
OF_CENTERED = (
    "center/sampler_mass",
    "center/policy_mass",
    "center/coefficient_l1",
    "center/drift_norm",
)
# sums of products of gradients by the logits, of the drift and of the loss without centering
PRODUCTS = ("drift_own", "drift_drift", "own_own")


def centering_term(
    top_logprobs_E: Tensor,
    top: TopLogprobs,
    targets: UpdateInputs,
    advantages_N: Tensor,
    scale_N: Tensor,
    config: LossConfig,
    tokens: int,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The centering term of some rows, and metrics: sums over tokens, over the `tokens` counted ones
    of the batch.

    `top_logprobs_E`: log pi, carries the gradient; `top`: with the anchor of the loss in the
    learner's place. The term's value means nothing.
    """
    assert targets.top_weights_E is not None and targets.tail_weights_N is not None
    usable_E = top.tokens.at_tokens(top.usable_N)
    now_E = top_logprobs_E.to(top.learner_E.dtype).masked_fill(~usable_E, 0.0)
    now_V = top.with_tails(now_E.detach())
    weights_V = torch.cat((targets.top_weights_E, targets.tail_weights_N))
    slopes_V = loss_slopes(now_V, top, weights_V, advantages_N, config)
    centered_V = slopes_V
    if LOSSES[config.name].by_sign:
        centered_V = unclipped_slopes(now_V, top, weights_V, advantages_N)
    coefficients_E = _coefficients(now_V, centered_V, top)
    term = (coefficients_E * top.tokens.at_tokens(scale_N) * now_E).sum()
    drift_V = _drift(now_V, coefficients_E, top)

    weighted_N = (top.tokens.count(targets.top_weights_E > 0) > 0) | (targets.tail_weights_N > 0)
    centered_N = top.usable_N & weighted_N
    values = (
        top.mass(top.sampler_E),
        top.mass(now_E.detach()),
        top.tokens.sum(coefficients_E.abs()),
        inner(drift_V, drift_V, top).sqrt(),
    )
    metrics = {
        name: value_N.masked_fill(~centered_N, 0.0).sum() / max(1, tokens)
        for name, value_N in zip(OF_CENTERED, values, strict=True)
    }
    metrics[CENTERED_FRACTION] = centered_N.sum() / max(1, tokens)
    if targets.top_sampled_E is not None:
        own_V = _own(now_V, slopes_V, targets.top_sampled_E, top) * top.at_all(targets.mask_N)
        for name, one_V, other_V in zip(
            PRODUCTS, (drift_V, drift_V, own_V), (own_V, drift_V, own_V), strict=True
        ):
            product_N = inner(one_V, other_V, top) * scale_N.square()
            metrics[name] = product_N.masked_fill(~centered_N, 0.0).sum()
    return term, metrics


def loss_slopes(
    now_V: Tensor,
    top: TopLogprobs,
    weights_V: Tensor,
    advantages_N: Tensor,
    config: LossConfig,
) -> Tensor:
    """[V]: the loss's derivative by log pi of each top token and tail, had it been sampled."""
    with torch.enable_grad():
        leaf_V = now_V.clone().requires_grad_()
        terms = Terms(
            logprobs_N=leaf_V,
            anchor_N=top.learner_V,
            advantages_N=top.at_all(advantages_N).to(leaf_V.dtype),
            weights_N=weights_V.to(leaf_V.dtype),
            mask_N=torch.ones_like(leaf_V, dtype=torch.bool),
            selected_N=None,
            rows=Segments.rows(torch.full((1,), len(leaf_V), device=leaf_V.device), len(leaf_V)),
        )
        per_token_V, _ = LOSSES[config.name].formula(terms, config)
        return torch.autograd.grad(per_token_V.sum(), leaf_V)[0]


def unclipped_slopes(
    now_V: Tensor, top: TopLogprobs, weights_V: Tensor, advantages_N: Tensor
) -> Tensor:
    """[V]: that derivative, of -A w pi / anchor."""
    ratio_V = bounded_exp(now_V - top.learner_V)
    return -top.at_all(advantages_N).to(now_V.dtype) * weights_V.to(now_V.dtype) * ratio_V


def _coefficients(now_V: Tensor, slopes_V: Tensor, top: TopLogprobs) -> Tensor:
    """[E]: A (q c - alpha pi), with alpha = q(tail) / pi(tail) c(tail)."""
    now_E, now_tail_N = top.split(now_V)
    slopes_E, slopes_tail_N = top.split(slopes_V)
    sampler_tail_N = top.split(top.sampler_V)[1]
    alpha_N = (sampler_tail_N - now_tail_N).exp() * slopes_tail_N
    return top.tokens.at_tokens(alpha_N) * now_E.exp() - top.sampler_E.exp() * slopes_E


def _drift(now_V: Tensor, coefficients_E: Tensor, top: TopLogprobs) -> Tensor:
    """[V]: the gradient that the term takes away, by the logits; a tail's as one logit."""
    total_N = top.tokens.sum(coefficients_E)
    coefficients_V = torch.cat((coefficients_E, torch.zeros_like(total_N)))
    return top.at_all(total_N) * now_V.exp() - coefficients_V


def _own(now_V: Tensor, slopes_V: Tensor, sampled_E: Tensor, top: TopLogprobs) -> Tensor:
    """[V]: the gradient of the loss without centering, alike. `sampled_E`: the sampled tokens;
    where none of the top tokens is, it is in the tail.
    """
    in_tail_N = top.tokens.count(sampled_E) == 0
    sampled_V = torch.cat((sampled_E, in_tail_N))
    slopes_E, slopes_tail_N = top.split(slopes_V * sampled_V)
    slope_N = top.tokens.sum(slopes_E) + slopes_tail_N
    return top.at_all(slope_N) * (sampled_V.to(now_V.dtype) - now_V.exp())


def inner(one_V: Tensor, other_V: Tensor, top: TopLogprobs) -> Tensor:
    """[N]: inner products over the top tokens and the tail of each token."""
    at_top_E, at_tail_N = top.split(one_V * other_V)
    return top.tokens.sum(at_top_E) + at_tail_N


def drift_cosine(metrics: Metrics) -> Metrics:
    """Metrics with the cosine of drift and loss in the place of products."""
    if any(name not in metrics for name in PRODUCTS):
        return dict(metrics)
    dot, drift, own = (metrics[name] for name in PRODUCTS)
    cosine = dot / max(math.sqrt(drift * own), SMALLEST_NORM)
    kept = {name: value for name, value in metrics.items() if name not in PRODUCTS}
    return {**kept, "center/drift_cosine": cosine}
