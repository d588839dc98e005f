"""policy_loss against hand-worked values and gradients, for every loss, reduction and extra term.

Shape legend: B sequences, T response positions.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from loss_cases import BYPASS, rows_of
from loss_oracle import expected
from matrices import (
    Corrected,
    LossInputs,
    batch_of,
    count_totals,
    policy_loss,
    rollout_correction,
)

from megatron_rl.batch import Share
from megatron_rl.config.schema import (
    CorrectionConfig,
    LossConfig,
    Reduction,
    RejectRule,
    WeightConfig,
)
from megatron_rl.loss.covariance import select_by_covariance
from megatron_rl.loss.policy_loss import Totals, reduction_of
from megatron_rl.tracking.metrics import unknown

B = 8
T = 7
CONFIGS = {
    "ppo": LossConfig(name="ppo", clip_low=0.2, clip_high=0.28),
    "ppo dual": LossConfig(
        name="ppo",
        clip_low=0.3,
        clip_high=0.1,
        params={"dual_clip": 1.5},
    ),
    "ppo turn": LossConfig(name="ppo", level="turn", aggregate="geometric"),
    "ppo sequence": LossConfig(
        name="ppo", level="sequence", clip_high=0.5, params={"dual_clip": 1.7}
    ),
    "ppo prefix": LossConfig(
        name="ppo",
        level="prefix",
        clip_low=0.1,
        clip_high=0.1,
        params={"dual_clip": 1.2},
    ),
    "cispo prefix": LossConfig(name="cispo", level="prefix", aggregate="geometric"),
    "vespo": LossConfig(name="vespo"),
    "gspo": LossConfig(name="gspo", clip_low=0.01, clip_high=0.1),
    "gspo dual": LossConfig(
        name="gspo",
        clip_low=0.05,
        clip_high=0.1,
        params={"dual_clip": 1.1},
    ),
    "cispo": LossConfig(name="cispo", clip_low=0.3, clip_high=0.2),
    "cispo absolute": LossConfig(
        name="cispo", clip_low=0.3, clip_high=1.5, params={"absolute": True}
    ),
    "sapo": LossConfig(name="sapo", params={"tau_positive": 1.0, "tau_negative": 1.05}),
    "gmpo": LossConfig(name="gmpo", clip_low=0.2, clip_high=0.4),
    "dppo tv": LossConfig(name="dppo", clip_low=0.03, clip_high=0.05),
    "dppo kl": LossConfig(
        name="dppo", clip_low=0.01, clip_high=0.02, params={"trust_region": "binary_kl"}
    ),
    "clip_cov": LossConfig(name="clip_cov"),
    "kl_cov": LossConfig(name="kl_cov", params={"cov_kl_coef": 0.7}),
    "reinforce": LossConfig(name="reinforce"),
    "rollout_is": LossConfig(name="rollout_is", clip_low=0.3, clip_high=0.5),
    "cross_entropy": LossConfig(name="cross_entropy"),
}


def example(seed: int = 0, dtype: torch.dtype = torch.float64) -> LossInputs:
    """Ragged rows of three prompts, rejected tokens that stay in the denominators and have a weight
    that no loss looks at, an empty row.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    anchor_BT = (
        -torch.rand(
            B,
            T,
            generator=generator,
            dtype=torch.float64,
        )
        * 2
        - 0.1
    )
    pi_BT = (
        (anchor_BT + 0.4 * normal(B, T) + 0.2 * normal(B, 1))
        .clamp(max=-0.01)
        .to(dtype)
        .requires_grad_()
    )
    lengths_B = torch.tensor([T, 3, 1, 5, 0, T, 2, 4])
    denominator_BT = torch.arange(T)[None] < lengths_B[:, None]
    mask_BT = denominator_BT & (torch.rand(B, T, generator=generator) > 0.15)
    mask_BT[6] = False
    advantages_B = normal(B)
    advantages_B[5] = 0.0
    return LossInputs(
        logprobs_BT=pi_BT,
        anchor_logprobs_BT=anchor_BT,
        sampler_logprobs_BT=anchor_BT + 0.1 * normal(B, T),
        ref_logprobs_BT=anchor_BT + 0.3 * normal(B, T),
        entropy_BT=torch.rand(B, T, generator=generator, dtype=torch.float64),
        advantages_B=advantages_B,
        weights_BT=0.3 + torch.rand(B, T, generator=generator, dtype=torch.float64),
        mask_BT=mask_BT,
        denominator_mask_BT=denominator_BT,
        prompt_ids_B=torch.tensor([7, 7, 3, 3, 3, 9, 9, 7]),
        selected_BT=torch.rand(B, T, generator=generator) > 0.6,
        turns_BT=torch.tensor([0, 0, -1, 1, 1, 1, 2]).expand(B, T),
    )


def select(
    prox_BT: torch.Tensor,
    advantages_B: torch.Tensor,
    mask_BT: torch.Tensor,
    config: LossConfig,
    seed: int,
) -> torch.Tensor | None:
    share = Share.alone(batch_of(mask_BT, prox_BT))
    found_N = select_by_covariance(
        share, prox_BT.flatten(), advantages_B, mask_BT.flatten(), config, seed
    )
    return None if found_N is None else found_N.view(mask_BT.shape)


def loss_and_gradient(
    inputs: LossInputs, config: LossConfig, totals: Totals | None = None
) -> tuple[float, torch.Tensor]:
    loss, _ = policy_loss(inputs, config, totals)
    (gradient,) = torch.autograd.grad(loss, inputs.logprobs_BT)
    return float(loss.detach()), gradient


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("reduction", list(Reduction))
def test_values_and_gradients(name: str, reduction: Reduction) -> None:
    config = replace(CONFIGS[name], reduction=reduction)
    for seed in range(3):
        inputs = example(seed)
        loss, gradient = loss_and_gradient(inputs, config)
        value, slope = expected(inputs, config, str(reduction), horizon=T)
        assert loss == pytest.approx(value, abs=1e-9)
        torch.testing.assert_close(gradient, slope, rtol=1e-7, atol=1e-9)
        assert slope.any()


@pytest.mark.parametrize("name", CONFIGS)
def test_float32_is_within_a_millionth(name: str) -> None:
    wide = example(1)
    narrow = replace(
        wide,
        **{
            key: value.detach().float()
            for key, value in vars(wide).items()
            if isinstance(value, torch.Tensor) and value.is_floating_point()
        },
    )
    narrow = replace(narrow, logprobs_BT=narrow.logprobs_BT.requires_grad_())
    loss, gradient = loss_and_gradient(narrow, CONFIGS[name])
    exact = replace(wide, logprobs_BT=narrow.logprobs_BT.detach().double())
    value, slope = expected(
        exact,
        CONFIGS[name],
        str(reduction_of(CONFIGS[name])),
        T,
    )
    assert loss == pytest.approx(value, abs=1e-6)
    torch.testing.assert_close(gradient.double(), slope, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", CONFIGS)
def test_only_the_policy_is_differentiated(name: str) -> None:
    """An anchor that is the policy's own tensor (one update per batch) is still a constant."""
    inputs = example()
    config = replace(CONFIGS[name], kl_coef=0.1)
    same = {"anchor_logprobs_BT": inputs.logprobs_BT, "ref_logprobs_BT": inputs.logprobs_BT}
    loss, gradient = loss_and_gradient(replace(inputs, **same), config)
    constants = {key: value.detach() for key, value in same.items()}
    value, slope = loss_and_gradient(replace(inputs, **constants), config)
    assert loss == value
    assert torch.equal(gradient, slope)
    loose = {
        key: getattr(inputs, key).clone().requires_grad_() for key in ("weights_BT", "advantages_B")
    }
    loss, _ = policy_loss(replace(inputs, **loose), config)
    assert torch.autograd.grad(
        loss,
        list(loose.values()),
        allow_unused=True,
    ) == (None, None)


def test_a_geometric_ratio_of_rows_is_gspo_and_one_turn_is_its_row() -> None:
    inputs = replace(example(2), turns_BT=None)
    gspo = replace(CONFIGS["gspo dual"], reduction="token_mean")
    value, slope = loss_and_gradient(inputs, replace(gspo, reduction="seq_mean_token_mean"))
    for level in ("sequence", "turn"):
        config = replace(
            gspo, name="ppo", level=level, aggregate="geometric", reduction="seq_mean_token_mean"
        )
        loss, gradient = loss_and_gradient(inputs, config)
        assert loss == pytest.approx(value, abs=1e-12)
        torch.testing.assert_close(gradient, slope)


@pytest.mark.parametrize("to", ["sampler", "anchor"])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "abs"])
def test_a_penalty_for_leaving_the_sampler_or_the_anchor(to: str, estimator: str) -> None:
    """KL(mu || pi) from tokens sampled by mu: 0 for a token without a sampler logprob."""
    inputs = example(4)
    inputs.sampler_logprobs_BT[0, 1] = math.nan
    config = LossConfig(name="reinforce", kl_coef=0.3, kl_to=to, kl_estimator=estimator)
    loss, gradient = loss_and_gradient(inputs, config)
    plain, slope = loss_and_gradient(inputs, replace(config, kl_coef=0.0))
    other_BT = inputs.sampler_logprobs_BT if to == "sampler" else inputs.anchor_logprobs_BT
    assert other_BT is not None
    x_BT = (other_BT - inputs.logprobs_BT.detach()).nan_to_num(0.0) * inputs.mask_BT
    kl_BT, own_BT = {
        "k1": (x_BT, -torch.ones_like(x_BT)),
        "k2": (x_BT.square() / 2, -x_BT),
        "k3": ((-x_BT).exp() - 1 + x_BT, (-x_BT).exp() - 1),
        "abs": (x_BT.abs(), -x_BT.sign()),
    }[estimator]
    n = int(inputs.denominator_mask_BT.sum())
    assert loss - plain == pytest.approx(0.3 * float((kl_BT * inputs.mask_BT).sum()) / n, abs=1e-9)
    torch.testing.assert_close(
        gradient - slope, 0.3 * own_BT * inputs.mask_BT / n, rtol=1e-6, atol=1e-9
    )


def test_the_reference_kl_weighted_by_the_ratio() -> None:
    """Without a bound its value and gradient are those of ratio x k3; a bound stops the weight."""
    inputs = example(3)
    config = LossConfig(name="reinforce", kl_coef=0.3, kl_cap=1e6)
    found = loss_and_gradient(inputs, config)
    plain = loss_and_gradient(inputs, replace(config, kl_coef=0.0))
    pi_BT = inputs.logprobs_BT
    mask_BT = inputs.mask_BT
    x_BT = (inputs.ref_logprobs_BT - pi_BT) * mask_BT
    ratio_BT = ((pi_BT - inputs.anchor_logprobs_BT) * mask_BT).exp()
    term = (ratio_BT * (x_BT.exp() - 1 - x_BT)).sum() * 0.3 / inputs.denominator_mask_BT.sum()
    assert found[0] - plain[0] == pytest.approx(float(term.detach()), abs=1e-9)
    torch.testing.assert_close(
        found[1] - plain[1], torch.autograd.grad(term, pi_BT)[0], rtol=1e-6, atol=1e-9
    )
    bounded = loss_and_gradient(inputs, replace(config, kl_cap=0.5))
    shrunk = (ratio_BT.clamp(max=0.5) / ratio_BT).detach()
    torch.testing.assert_close(
        bounded[1] - plain[1], (found[1] - plain[1]) * shrunk, rtol=1e-6, atol=1e-9
    )


@pytest.mark.parametrize(
    "name", ["ppo dual", "gspo", "cispo", "gmpo", "dppo tv", "dppo kl", "rollout_is"]
)
def test_the_examples_clip_on_both_sides(name: str) -> None:
    """Otherwise the comparison above would say nothing about the bounds."""
    found = [policy_loss(example(seed), CONFIGS[name])[1] for seed in range(3)]
    sides = ["clip_fraction_high", "clip_fraction_low"]
    if name == "ppo dual":
        sides.append("dual_clip_fraction")
    for side in sides:
        assert 0 < sum(float(metrics[f"loss/{side}"]) for metrics in found) < 3, side


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "abs"])
def test_kl_and_entropy_terms(estimator: str) -> None:
    config = LossConfig(kl_coef=0.3, kl_estimator=estimator, entropy_coef=0.2)
    inputs = example(2)
    entropy_BT = inputs.entropy_BT.clone().requires_grad_()
    inputs = replace(inputs, entropy_BT=entropy_BT)
    loss, metrics = policy_loss(inputs, config)
    gradient, entropy_gradient = torch.autograd.grad(loss, [inputs.logprobs_BT, entropy_BT])
    value, slope = expected(inputs, config, "token_mean", T)
    assert float(loss.detach()) == pytest.approx(value, abs=1e-9)
    torch.testing.assert_close(gradient, slope, rtol=1e-7, atol=1e-9)
    tokens = int(inputs.denominator_mask_BT.sum())
    torch.testing.assert_close(entropy_gradient, -0.2 * inputs.mask_BT.double() / tokens)
    parts = metrics["loss/policy"] + 0.3 * metrics["loss/kl"] - 0.2 * metrics["loss/entropy"]
    assert float(parts) == pytest.approx(value, abs=1e-9)


def test_a_zero_coefficient_does_no_work() -> None:
    inputs = replace(example(), ref_logprobs_BT=None, entropy_BT=None)
    _, metrics = policy_loss(inputs, LossConfig())
    assert not {"loss/kl", "loss/entropy"} & set(metrics)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("reduction", list(Reduction))
def test_micro_batches_add_up(name: str, reduction: Reduction) -> None:
    """Any split of the rows, a prompt over several parts included, gives the loss of the whole."""
    config = replace(CONFIGS[name], reduction=reduction, kl_coef=0.1, entropy_coef=0.1)
    inputs = example(3)
    totals = count_totals(inputs.denominator_mask_BT, inputs.prompt_ids_B, horizon=T)
    whole, gradient = loss_and_gradient(inputs, config, totals)
    whole_metrics = policy_loss(inputs, config, totals)[1]
    for parts in (
        [[0, 3, 6], [1, 2], [4], [5, 7]],
        [[7, 6, 5, 4, 3, 2, 1, 0]],
        [[i] for i in range(B)],
    ):
        found = [
            policy_loss(
                rows_of(inputs, torch.tensor(part)),
                config,
                totals,
            )
            for part in parts
        ]
        total = sum(loss for loss, _ in found)
        assert float(total.detach()) == pytest.approx(whole, abs=1e-12)
        (split_gradient,) = torch.autograd.grad(total, inputs.logprobs_BT)
        torch.testing.assert_close(split_gradient, gradient)
        for key in whole_metrics.keys() - {"loss/empty_microbatches"}:
            added = float(sum(metrics[key] for _, metrics in found))
            assert added == pytest.approx(float(whole_metrics[key]), abs=1e-6), key


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("reduction", list(Reduction))
def test_all_masked_is_zero_with_zero_gradients_and_a_counter(
    name: str, reduction: Reduction
) -> None:
    config = replace(CONFIGS[name], reduction=reduction, kl_coef=0.1, entropy_coef=0.1)
    inputs = example()
    nothing_BT = torch.zeros_like(inputs.mask_BT)
    poison_BT = torch.full_like(inputs.anchor_logprobs_BT, math.nan)
    logprobs_BT = poison_BT.clone().requires_grad_()
    inputs = replace(
        inputs,
        mask_BT=nothing_BT,
        logprobs_BT=logprobs_BT,
        anchor_logprobs_BT=poison_BT,
        ref_logprobs_BT=poison_BT,
        entropy_BT=poison_BT,
        weights_BT=poison_BT,
    )
    # the tokens of other micro-batches
    elsewhere = count_totals(
        torch.ones(1, 2).bool(),
        torch.zeros(1),
        horizon=2,
    )
    for denominators_BT, totals in (
        (nothing_BT, None),
        (inputs.denominator_mask_BT, None),
        (nothing_BT, elsewhere),
    ):
        loss, metrics = policy_loss(
            replace(inputs, denominator_mask_BT=denominators_BT), config, totals
        )
        (gradient,) = torch.autograd.grad(loss, logprobs_BT)
        assert float(loss.detach()) == 0.0
        assert not gradient.any()
        assert float(metrics["loss/empty_microbatches"]) == 1.0
        assert all(math.isfinite(float(value)) for value in metrics.values())


def test_a_gradient_that_is_not_a_number_is_not_hidden() -> None:
    """A kept token's NaN logprob is reported by the learner, not dropped by the loss."""
    inputs = example()
    logprobs_BT = inputs.logprobs_BT.detach().clone()
    logprobs_BT[tuple(inputs.mask_BT.nonzero()[0])] = math.nan
    loss, _ = policy_loss(replace(inputs, logprobs_BT=logprobs_BT.requires_grad_()), LossConfig())
    assert math.isnan(float(loss.detach()))


def test_default_reductions() -> None:
    assert reduction_of(LossConfig()) == "token_mean"
    assert reduction_of(LossConfig(name="gspo")) == "seq_mean_token_mean"
    assert reduction_of(LossConfig(name="gmpo")) == "seq_mean_token_mean"
    assert reduction_of(LossConfig(name="gspo", reduction="prompt_mean")) == "prompt_mean"


def test_totals() -> None:
    inputs = example()
    totals = count_totals(inputs.denominator_mask_BT, inputs.prompt_ids_B, horizon=100)
    assert (
        totals.tokens,
        totals.sequences,
        totals.prompts,
        totals.horizon,
    ) == (29, 7, 3, 100)
    assert totals.prompt_ids_G.tolist() == [3, 7, 9]
    assert totals.prompt_tokens_G.tolist() == [6, 14, 9]
    none = count_totals(
        torch.zeros(2, 3).bool(),
        torch.tensor([1, 2]),
        horizon=3,
    )
    assert (none.tokens, none.sequences, none.prompts) == (0, 0, 0)


def test_zero_weights_silence_every_loss() -> None:
    """No loss ignores the correction."""
    inputs = replace(example(), weights_BT=torch.zeros(B, T))
    for config in CONFIGS.values():
        loss, gradient = loss_and_gradient(inputs, config)
        assert (loss, bool(gradient.any())) == (0.0, False), config.name


class TestAnchorSampler:
    """The correction is formed from the current policy, in the loss."""

    def inputs(self, correction: CorrectionConfig, fault: float | None = None) -> LossInputs:
        inputs = example(4)
        mu_BT = inputs.sampler_logprobs_BT.float()
        if fault is not None:
            mu_BT[0, 0] = fault
        before = rollout_correction(None, mu_BT, inputs.denominator_mask_BT, correction)
        return replace(
            inputs,
            sampler_logprobs_BT=mu_BT,
            anchor_logprobs_BT=mu_BT,
            mask_BT=before.mask_BT,
            weights_BT=before.weights_BT,
            denominator_mask_BT=before.denominator_mask_BT,
        )

    def formed(self, inputs: LossInputs, correction: CorrectionConfig) -> Corrected:
        return rollout_correction(
            inputs.logprobs_BT.detach(),
            inputs.sampler_logprobs_BT,
            inputs.mask_BT,
            correction,
            judge=lambda counted_B: (inputs.advantages_B, counted_B),
        )

    @pytest.mark.parametrize(
        "name", ["ppo", "gspo", "cispo", "sapo", "gmpo", "dppo tv", "rollout_is"]
    )
    def test_ratio_losses_use_the_sampler(self, name: str) -> None:
        inputs = self.inputs(BYPASS)
        loss, _ = policy_loss(inputs, CONFIGS[name], None, BYPASS)
        value, _ = expected(
            inputs,
            CONFIGS[name],
            str(reduction_of(CONFIGS[name])),
            T,
        )
        assert float(loss.detach()) == pytest.approx(value, abs=1e-7)

    @pytest.mark.parametrize("level", ["token", "sequence"])
    def test_reinforce_is_weighted_by_the_current_policy(self, level: str) -> None:
        correction = replace(BYPASS, weight=WeightConfig(level=level, high=1.4))
        inputs = self.inputs(correction)
        loss, _ = policy_loss(inputs, CONFIGS["reinforce"], None, correction)
        formed = self.formed(inputs, correction)
        assert 1.4 in formed.weights_BT
        value, slope = expected(
            replace(inputs, weights_BT=formed.weights_BT), CONFIGS["reinforce"], "token_mean", T
        )
        assert float(loss.detach()) == pytest.approx(value, abs=1e-7)
        # the weight is detached
        torch.testing.assert_close(torch.autograd.grad(loss, inputs.logprobs_BT)[0], slope)

    def test_rules_reject_but_leave_the_denominators(self) -> None:
        rule = RejectRule(stat="ratio", reduce="mean", low=0.8, high=1.3)
        conditional = RejectRule(stat="k1", reduce="mean", high=-0.05, when="negative_advantage")
        correction = replace(BYPASS, reject=[rule, conditional])
        inputs = self.inputs(correction)
        formed = self.formed(inputs, correction)
        assert 0 < int(formed.mask_BT.sum()) < int(inputs.mask_BT.sum())
        loss, metrics = policy_loss(inputs, LossConfig(), None, correction)
        survivors = replace(inputs, mask_BT=formed.mask_BT, weights_BT=formed.mask_BT.double())
        assert float(loss.detach()) == pytest.approx(
            expected(survivors, LossConfig(), "token_mean", T)[0], abs=1e-7
        )
        assert float(metrics["loss/trained_fraction"]) < 1

    @pytest.mark.parametrize("policy", ["drop", "one", "zero", "reject"])
    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    def test_missing_sampler_logprobs(self, policy: str, value: float) -> None:
        correction = replace(BYPASS, non_finite=policy)
        inputs = self.inputs(correction, value)
        loss, _ = policy_loss(inputs, LossConfig(), None, correction)
        (gradient,) = torch.autograd.grad(loss, inputs.logprobs_BT)
        assert math.isfinite(float(loss.detach()))
        assert bool(torch.isfinite(gradient).all())
        # ratio 1, weight 1
        expected_gradient = -inputs.advantages_B[0] / inputs.denominator_mask_BT.sum()
        assert float(gradient[0, 0]) == pytest.approx(
            float(expected_gradient) if policy == "one" else 0.0
        )
        tokens = int(example(4).denominator_mask_BT.sum())
        gone = {"drop": 1, "one": 0, "zero": 0, "reject": T}[policy]
        assert int(inputs.denominator_mask_BT.sum()) == tokens - gone


class TestCovariance:
    def batch(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        prox_BT = -torch.rand(12, 10, generator=generator) * 6
        # a mean at which a masked token, filled with zeros, would have a covariance of 1.6
        advantages_B = torch.randn(12, generator=generator) - 1.0
        mask_BT = torch.rand(12, 10, generator=generator) > 0.3
        return prox_BT, advantages_B, mask_BT

    def covariance(self) -> torch.Tensor:
        prox_BT, advantages_B, mask_BT = self.batch()
        advantages_BT = advantages_B[:, None].expand_as(prox_BT)
        a = advantages_BT[mask_BT].mean()
        p = prox_BT[mask_BT].mean()
        return ((advantages_BT - a) * (prox_BT - p)).masked_fill(~mask_BT, -math.inf)

    def selected(
        self, batch: tuple[torch.Tensor, ...], name: str, seed: int = 0, **params: float
    ) -> torch.Tensor:
        config = LossConfig(name=name, params=params)
        selected_BT = select(*batch, config, seed)
        assert selected_BT is not None
        return selected_BT

    @pytest.mark.parametrize("fraction", [0.1, 1e-4])
    def test_kl_cov_takes_the_highest_and_at_least_one(self, fraction: float) -> None:
        batch = self.batch()
        mask_BT = batch[2]
        selected_BT = self.selected(batch, "kl_cov", cov_fraction=fraction)
        assert int(selected_BT.sum()) == max(1, int(fraction * mask_BT.sum()))
        covariance_BT = self.covariance()
        assert covariance_BT[selected_BT].min() >= covariance_BT[mask_BT & ~selected_BT].max()

    def test_clip_cov_draws_inside_its_band_by_seed(self) -> None:
        batch = self.batch()
        band = {"cov_fraction": 0.08, "cov_low": 0.5, "cov_high": 2.0}
        draws = [self.selected(batch, "clip_cov", seed, **band) for seed in (0, 0, 1)]
        assert torch.equal(draws[0], draws[1])
        assert not torch.equal(draws[0], draws[2])
        drawn = self.covariance()[draws[0]]
        assert bool(((drawn > 0.5) & (drawn < 2.0)).all())
        assert len(drawn) == int(0.08 * batch[2].sum())

    @pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
    def test_order_padding_and_what_a_masked_row_holds_do_not_matter(self, name: str) -> None:
        prox_BT, advantages_B, mask_BT = self.batch()
        mask_BT[4] = False
        order = torch.randperm(12, generator=torch.Generator().manual_seed(1))
        padding = torch.full((12, 3), math.nan)
        spoiled_B = advantages_B.clone()
        spoiled_B[4] = math.nan
        wide_BT = torch.cat([prox_BT, padding], 1)
        wide_mask_BT = torch.cat([mask_BT, padding.isfinite()], 1)
        plain_BT, moved_BT = (
            self.selected(batch, name, seed=3, cov_fraction=0.1, cov_low=0.2)
            for batch in (
                (prox_BT, advantages_B, mask_BT),
                (wide_BT[order], spoiled_B[order], wide_mask_BT[order]),
            )
        )
        assert torch.equal(moved_BT[:, :10], plain_BT[order])

    def test_rounding_never_decides(self) -> None:
        """Equal advantages have zero covariance, up to rounding: the tokens are drawn by the seed,
        independent of the padding.
        """
        prox_BT = (
            -torch.rand(
                1,
                9,
                generator=torch.Generator().manual_seed(2),
            )
            * 5
        )
        advantages_B = torch.tensor([0.1], dtype=torch.float64)  # the mean of nine is another
        draws = set()
        for seed in range(20):
            plain_BT, padded_BT = (
                self.selected((one_BT, advantages_B, one_BT < 0), "kl_cov", seed, cov_fraction=0.4)
                for one_BT in (prox_BT, torch.nn.functional.pad(prox_BT, (0, 5)))
            )
            assert torch.equal(padded_BT[:, :9], plain_BT)
            assert int(plain_BT.sum()) == 3
            draws.add(tuple(plain_BT[0].tolist()))
        assert len(draws) > 5


def test_every_metric_is_in_the_table() -> None:
    for config in CONFIGS.values():
        _, metrics = policy_loss(example(), replace(config, kl_coef=0.1, entropy_coef=0.1))
        assert unknown(metrics) == [], config.name


def test_extreme_shifts_overflow_nothing() -> None:
    """e to the 80 is infinite in float32 and useless in float64."""
    inputs = example()
    for shift, config in itertools.product([80.0, -80.0], CONFIGS.values()):
        pi_BT = (inputs.anchor_logprobs_BT + shift).requires_grad_()
        loss, gradient = loss_and_gradient(replace(inputs, logprobs_BT=pi_BT), config)
        assert math.isfinite(loss), (config.name, shift)
        assert bool(torch.isfinite(gradient).all()), (config.name, shift)
