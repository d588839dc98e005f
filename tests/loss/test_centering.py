"""Score centering against its definition: the sum over the whole vocabulary, by autograd in FP64.

Shape legend: N response tokens, V words, E top tokens.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from centering_cases import (
    WORDS,
    Example,
    at_labels,
    at_top,
    centered,
    definition,
    example,
    gradient,
    inputs_of,
)
from torch import Tensor

from megatron_rl.config.correction_rules import check_objective
from megatron_rl.config.rules import top_logprobs
from megatron_rl.config.sampling import TopLogprobsSection
from megatron_rl.config.schema import (
    ConfidenceCap,
    CorrectionConfig,
    LossConfig,
    RejectRule,
    RolloutSection,
    WeightConfig,
)
from megatron_rl.loss import centering
from megatron_rl.loss.policy_loss import count_totals, over_trained, policy_loss
from megatron_rl.loss.table import LOSSES
from megatron_rl.rollout_correction.top_logprobs import SMALLEST_MASS, TopLogprobs

PLAIN = WeightConfig(level="none")
TIS = WeightConfig(high=1.3)
CALIBRATED = WeightConfig(high=None, cap=ConfidenceCap(confidence=0.5))
MASK = WeightConfig(low=0.7, high=1.3, outside="zero")
BAND = RejectRule(level="token", stat="ratio", low=0.8, high=1.2)
LOSS = {
    "reinforce": LossConfig(name="reinforce"),
    "ppo": LossConfig(name="ppo"),
    "ppo dual": LossConfig(name="ppo", params={"dual_clip": 1.2}),
    "cispo": LossConfig(name="cispo", clip_low=0.3, clip_high=0.2),
    "cispo absolute": LossConfig(name="cispo", clip_high=1.1, params={"absolute": True}),
    "sapo": LossConfig(name="sapo"),
    "dppo": LossConfig(name="dppo", clip_low=0.03, clip_high=0.05),
    "dppo kl": LossConfig(
        name="dppo", clip_low=0.01, clip_high=0.01, params={"trust_region": "binary_kl"}
    ),
}
CORRECTION = {
    "plain": centered(weight=PLAIN),
    "tis": centered(weight=TIS),
    "calibrated": centered(weight=CALIBRATED),
    "mask": centered(weight=MASK),
    "sequence": centered(weight=WeightConfig(level="sequence", high=1.5)),
    "prefix": centered(weight=WeightConfig(level="prefix", high=1.5)),
    "geometric prefix": centered(
        weight=WeightConfig(level="prefix", aggregate="geometric", low=0.8, high=1.5)
    ),
    "token rule": centered(weight=TIS, reject=[BAND]),
    "when": centered(weight=PLAIN, reject=[replace(BAND, when="negative_advantage")]),
    "row rule": centered(
        reject=[RejectRule(level="sequence", stat="ratio", reduce="mean", low=0.95, high=1.2)]
    ),
    "prefix sum": centered(
        reject=[RejectRule(level="prefix", stat="ratio", reduce="sum", low=0.5, high=2.0)]
    ),
    "prefix mean": centered(
        reject=[RejectRule(level="prefix", stat="k3", reduce="mean", high=0.06)]
    ),
    "prefix max": centered(
        reject=[RejectRule(level="prefix", stat="ratio", reduce="max", high=1.4)]
    ),
}
CASES = [(loss, "tis") for loss in LOSS] + [("reinforce", one) for one in CORRECTION]
CASES += [("ppo", "token rule"), ("ppo dual", "prefix"), ("sapo", "sequence")]


def found(one: Example, loss: LossConfig, correction: CorrectionConfig, size: int) -> Tensor:
    return gradient(one, inputs_of(one, correction, size), loss, correction, size)[0]


def error(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm())


@pytest.mark.parametrize(("loss", "correction"), CASES)
def test_with_the_whole_vocabulary_it_is_the_definition(loss: str, correction: str) -> None:
    """Also where the policy has left the proximal one, and in float32."""
    configs = (LOSS[loss], CORRECTION[correction])
    for seed in range(2):
        one = example(seed)
        expected_NV = definition(one, *configs)
        assert error(found(one, *configs, WORDS), expected_NV) < 1e-6
        assert expected_NV.norm() > 0


def test_against_the_sampler() -> None:
    loss = LossConfig(name="rollout_is", clip_low=0.3, clip_high=0.5)
    for one_loss, reject in ((loss, []), (LOSS["ppo"], [BAND]), (LOSS["reinforce"], [BAND])):
        correction = centered(anchor="sampler", weight=PLAIN, reject=reject)
        one = example(3)
        expected_NV = definition(one, one_loss, correction)
        assert error(found(one, one_loss, correction, WORDS), expected_NV) < 1e-6


@pytest.mark.parametrize("correction", ["plain", "tis", "token rule", "prefix", "prefix max"])
def test_without_a_proximal_pass(correction: str) -> None:
    config = CORRECTION[correction]
    one = example(4, moved=0.0)
    one = replace(one, prox_NV=one.logits_NV.log_softmax(dim=1))
    for size in (3, WORDS):
        alone = inputs_of(one, config, size, prox_pass=False)
        assert alone.top_weights_E is None
        for loss in (LOSS["ppo"], LOSS["reinforce"]):
            found_NV, _ = gradient(one, alone, loss, config, size)
            assert error(found_NV, found(one, loss, config, size)) < 1e-6


@pytest.mark.parametrize("loss", LOSS)
def test_equal_policies_leave_no_term_to_the_last_bit(loss: str) -> None:
    for name, config in CORRECTION.items():
        one = example(5, moved=0.0)
        same_NV = one.logits_NV.log_softmax(dim=1).half().float()
        one = replace(one, sampler_NV=same_NV, prox_NV=same_NV, logits_NV=same_NV)
        for size in (1, 4, WORDS):
            targets = inputs_of(one, config, size)
            top_E = at_top(one, same_NV, size).requires_grad_()
            assert targets.top_counts_N is not None and targets.top_logprobs_E is not None
            top = TopLogprobs.of(targets.top_counts_N, targets.top_logprobs_E.half(), top_E)
            assert (targets.top_weights_E == 1.0).all(), name
            term, metrics = centering.centering_term(
                top_E,
                top,
                targets,
                targets.responses.at_tokens(one.advantages_B.float()),
                torch.ones_like(one.labels_N).float(),
                LOSS[loss],
                len(one.labels_N),
            )
            assert not torch.autograd.grad(term, top_E)[0].any(), (name, size)
            assert float(metrics["center/coefficient_l1"]) == 0.0


F = {
    "one": (PLAIN, lambda ratio: torch.ones_like(ratio)),
    "truncated": (WeightConfig(high=2.0), lambda ratio: ratio.clamp(max=2.0)),
    "masked": (
        WeightConfig(low=0.5, high=5.0, outside="zero"),
        lambda ratio: ratio * ((ratio >= 0.5) & (ratio <= 5.0)),
    ),
}


def published(one: Example, f: Any, size: int) -> Tensor:
    """The authors' loss for a single update a batch, where p is the policy."""
    logits_NV = one.logits_NV.clone().requires_grad_()
    log_p_NV = logits_NV.log_softmax(dim=1)
    p_NH = at_rows(one, log_p_NV.detach().exp(), size)
    q_NH = at_rows(one, one.sampler_NV.exp(), size)
    floor = SMALLEST_MASS
    tail_q_N = (1 - q_NH.sum(1)).clamp(min=floor)
    tail_p_N = (1 - p_NH.sum(1)).clamp(min=floor)
    rho_N = tail_q_N / tail_p_N
    alpha_N = rho_N * f(1 / rho_N)
    coefficient_NH = q_NH * f(p_NH / q_NH) - alpha_N[:, None] * p_NH
    ratio_N = (at_labels(one, log_p_NV.detach()) - at_labels(one, one.sampler_NV)).exp()
    inner_N = f(ratio_N) * at_labels(one, log_p_NV)
    inner_N = inner_N - (coefficient_NH * at_rows(one, log_p_NV, size)).sum(1)
    advantages_N = one.advantages_B.repeat_interleave(one.length)
    loss = (-advantages_N * inner_N)[one.mask_N].sum() / int(one.mask_N.sum())
    return torch.autograd.grad(loss, logits_NV)[0]


def at_rows(one: Example, values_NV: Tensor, size: int) -> Tensor:
    return values_NV.gather(1, one.sampler_NV.topk(size, dim=1).indices)


def on_policy(seed: int, **sizes: Any) -> Example:
    one = example(seed, moved=0.0, **sizes)
    return replace(one, prox_NV=one.logits_NV.log_softmax(dim=1))


def test_it_is_the_published_formula_on_a_thousand_batches() -> None:
    kinds = list(F.values())
    for seed in range(1000):
        weight, f = kinds[seed % len(kinds)]
        one = on_policy(seed, rows=1, length=3, words=6)
        size = 1 + seed % 5
        found_NV = found(one, LOSS["reinforce"], centered(weight=weight), size)
        torch.testing.assert_close(found_NV, published(one, f, size), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("correction", ["plain", "tis", "calibrated", "token rule"])
def test_a_set_that_holds_nearly_all_is_within_the_error_of_its_tail(correction: str) -> None:
    """32 of 400 words; the error shrinks with the tail's mass, and the tail's part is not small."""
    config = CORRECTION[correction]
    errors = []
    for sharpness in (2.5, 4.0):
        one = example(6, words=400, sharpness=sharpness)
        expected_NV = definition(one, LOSS["ppo"], config)
        tail = 1 - float(at_top(one, one.sampler_NV.exp(), 32).view(-1, 32).sum(1).mean())
        errors.append(error(found(one, LOSS["ppo"], config, 32), expected_NV))
        assert errors[-1] < 2 * tail
    assert errors[1] < errors[0]


def without_tail(now_V: Tensor, slopes_V: Tensor, top: TopLogprobs) -> Tensor:
    return -top.sampler_E.exp() * top.split(slopes_V)[0]


def swapped(counts_N: Tensor, sampler_E: Tensor, learner_E: Tensor) -> TopLogprobs:
    return ORIGINAL(counts_N, learner_E.detach(), sampler_E)


ORIGINAL = TopLogprobs.of


@pytest.mark.parametrize("bug", ["none", "tail", "swapped", "rejected"])
def test_injected_bugs(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, f = F["truncated"]
    config = centered(weight=weight)
    one = on_policy(7)
    expected_NV = published(one, f, 3)
    if bug == "tail":
        monkeypatch.setattr(centering, "_coefficients", without_tail)
    if bug == "swapped":
        monkeypatch.setattr(TopLogprobs, "of", swapped)
    targets = inputs_of(one, config, 3)
    if bug == "rejected":
        config = replace(config, weight=PLAIN, reject=[BAND])
        expected_NV = definition(one, LOSS["reinforce"], config)
        targets = inputs_of(one, config, WORDS)
        mask_E = targets.mask_N.repeat_interleave(targets.top_counts_N.long())
        assert not mask_E.all() and targets.top_weights_E is not None
        targets = replace(targets, top_weights_E=targets.top_weights_E * mask_E)
    size = WORDS if bug == "rejected" else 3
    wrong = error(gradient(one, targets, LOSS["reinforce"], config, size)[0], expected_NV)
    assert (wrong < 1e-5) == (bug == "none")


def test_the_coefficients_are_constants() -> None:
    """No gradient flows through q, p, pi or c: the term is linear in log pi."""
    one = example(11)
    targets = inputs_of(one, CORRECTION["tis"], 4)
    assert targets.top_counts_N is not None and targets.top_logprobs_E is not None
    assert targets.top_anchor_E is not None
    top = TopLogprobs.of(targets.top_counts_N, targets.top_logprobs_E, targets.top_anchor_E)
    pi_E = at_top(one, one.logits_NV.log_softmax(dim=1), 4).requires_grad_()
    scale_N = torch.linspace(0.5, 2.0, len(one.labels_N), dtype=torch.float64)
    advantages_N = targets.responses.at_tokens(one.advantages_B)
    given = (top, targets, advantages_N, scale_N, LOSS["ppo"], 1)
    term, _ = centering.centering_term(pi_E, *given)
    (slopes_E,) = torch.autograd.grad(term, pi_E)
    torch.testing.assert_close(term.detach(), (slopes_E * pi_E.detach()).sum())


def test_metrics_are_means_over_centered_tokens() -> None:
    one = example(12)
    config = CORRECTION["token rule"]
    _, metrics = gradient(one, inputs_of(one, config, 4), LOSS["ppo"], config, 4)
    reported = over_trained({name: float(value) for name, value in metrics.items()})
    q_NH = at_rows(one, one.sampler_NV.exp(), 4)[one.mask_N]
    assert reported["center/sampler_mass"] == pytest.approx(float(q_NH.sum(1).mean()))
    assert 0 < reported["center/policy_mass"] < 1
    assert reported["center/coefficient_l1"] > 0
    assert reported["center/token_fraction"] == 1.0  # rejected ones too
    assert float(metrics["loss/trained_fraction"]) < 1.0
    # the norm of the term's own gradient, where no logit is in the tail
    targets = inputs_of(one, config, WORDS)
    whole_NV, metrics = gradient(one, targets, LOSS["ppo"], config, WORDS)
    plain_NV = gradient(one, without(targets), LOSS["ppo"], config, WORDS)[0]
    drift_NV = plain_NV - whole_NV
    norms_N = drift_NV[one.mask_N].norm(dim=1) * int(one.mask_N.sum())
    reported = over_trained({name: float(value) for name, value in metrics.items()})
    assert reported["center/drift_norm"] == pytest.approx(float(norms_N.mean()), rel=1e-4)
    cosine = torch.cosine_similarity(drift_NV.flatten(), plain_NV.flatten(), dim=0)
    assert reported["center/drift_cosine"] == pytest.approx(float(cosine), rel=1e-4)


@pytest.mark.parametrize("prox_pass", [True, False])
def test_micro_batches_add_up(prox_pass: bool) -> None:
    one = example(12)
    config = CORRECTION["token rule"]
    targets = inputs_of(one, config, 4, prox_pass)
    policy_NV = one.logits_NV.log_softmax(dim=1)
    counts_B = targets.responses.count(targets.denominator_mask_N)
    totals = count_totals(counts_B, targets.groups_B, one.length)
    found = []
    for rows in ([0, 1, 2, 3], [0, 1], [2, 3]):
        tokens_N = torch.isin(torch.arange(len(one.labels_N)) // one.length, torch.tensor(rows))
        part = replace(one, sampler_NV=one.sampler_NV[tokens_N], mask_N=one.mask_N[tokens_N])
        found.append(
            policy_loss(
                at_labels(one, policy_NV)[tokens_N],
                targets.rows(torch.tensor(rows)),
                LOSS["ppo"],
                totals,
                config,
                None,
                at_top(part, policy_NV[tokens_N], 4),
            )
        )
    (whole, metrics), *parts = found
    assert float(sum(loss for loss, _ in parts)) == pytest.approx(float(whole), rel=1e-6)
    for name in metrics:
        if name.startswith(("center/", "rollout_corr/top_")):
            total = sum(float(one_part[name]) for _, one_part in parts)
            assert total == pytest.approx(float(metrics[name]), rel=1e-6), name
    assert ("rollout_corr/top_kl" in metrics) == (not prox_pass)


def without(targets: Any) -> Any:
    return replace(targets, top_weights_E=None, tail_weights_N=None)


def test_tokens_without_a_set_or_a_logprob_have_no_term() -> None:
    one = example(9)
    config = CORRECTION["tis"]
    one.sampler_NV[4] = math.nan
    targets = inputs_of(one, config, 4)
    assert targets.tail_weights_N is not None
    centered_N = targets.tail_weights_N > 0
    assert torch.equal(centered_N, one.mask_N & (torch.arange(len(one.mask_N)) != 4))
    found_NV, _ = gradient(one, targets, LOSS["ppo"], config, 4)
    assert found_NV.isfinite().all()
    assert not found_NV[4].any() and not found_NV[2].any()


def test_what_the_batch_solves_holds_for_every_top_token() -> None:
    """A solved cap, a budget's cutoff, and the normalization."""
    one = example(10)
    one = replace(one, sampler_NV=one.sampler_NV.float(), prox_NV=one.prox_NV.float())
    tight = WeightConfig(target_ess=0.99, high=5.0, normalize=True)
    rule = RejectRule(level="token", stat="m2", budget=0.1)
    targets = inputs_of(one, centered(weight=tight, reject=[rule]), WORDS)
    weights_N = targets.weights_N[targets.mask_N]
    assert targets.top_weights_E is not None
    kept_E = targets.top_weights_E[targets.top_weights_E > 0]
    assert 0 < len(kept_E) < len(targets.top_weights_E)
    assert float(kept_E.max()) == pytest.approx(float(weights_N.max()), rel=1e-6)
    # the sampled token's own entry has the sampled token's weight
    labels_NM = one.labels_N[:, None] == one.sampler_NV.topk(WORDS, dim=1).indices
    own_N = targets.top_weights_E[labels_NM[one.mask_N].flatten()]
    torch.testing.assert_close(own_N, targets.weights_N[one.mask_N], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("loss", sorted(set(LOSSES) - {one.split()[0] for one in LOSS}))
def test_other_losses_are_refused(loss: str) -> None:
    anchor = "sampler" if LOSSES[loss].against_sampler else "prox"
    config = centered(weight=PLAIN, anchor=anchor)
    problems = check_objective(config, LossConfig(name=loss))
    if loss == "rollout_is":
        assert not problems
        return
    (problem,) = problems
    assert problem.startswith(f"loss.name is {loss}: correction.center: top_logprobs")


@pytest.mark.parametrize(
    ("correction", "loss", "key"),
    [
        (centered(), LossConfig(level="sequence"), "loss.level is sequence"),
        (centered(anchor="interpolated"), LossConfig(), "correction.anchor is interpolated"),
        (
            centered(anchor="sampler"),
            LossConfig(name="reinforce"),
            "correction.weight.level is token",
        ),
        (
            centered(reject=[RejectRule(level="prefix", stat="m2", reduce="sum", budget=0.1)]),
            LossConfig(),
            "correction.reject[0].budget is 0.1",
        ),
    ],
)
def test_what_does_not_go_together(
    correction: CorrectionConfig, loss: LossConfig, key: str
) -> None:
    (problem,) = check_objective(correction, loss)
    assert problem.startswith(key)
    assert not check_objective(replace(correction, center="none"), loss)


def test_the_sampler_has_to_report_them() -> None:
    (problem,) = top_logprobs(RolloutSection(), centered())
    assert "rollout.top_logprobs.max is 0" in problem
    rollout = RolloutSection(top_logprobs=TopLogprobsSection(max=32))
    assert not list(top_logprobs(rollout, centered()))
    assert not list(top_logprobs(RolloutSection(), CorrectionConfig()))
