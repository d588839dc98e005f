"""Corrections of other projects: their formulas against ours, on random data.

Shape legend: B sequences, T response positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from loss_cases import inputs_of
from matrices import matrix, policy_loss, rollout_correction
from rollouts import rollout
from torch import Tensor

from translation_cases import (  # isort: skip
    ADVANTAGES,
    CASES,
    LOSS,
    NEMO_ON,
    OLD,
    TOKEN_MASK,
    TWO_POLICIES,
    Formula,
    Theirs,
    areal,
    band,
    data,
    nemo,
    openrlhf,
    skyrl,
    slime_mis,
    trl,
    verl_in_loss,
    verl_rs,
    verl_run,
)

from megatron_rl.apps.translation.keys import Native
from megatron_rl.apps.translation.translate import translate
from megatron_rl.batch import collate
from megatron_rl.config import ConfigError, from_mapping
from megatron_rl.config.correction_rules import check_objective
from megatron_rl.config.schema import Level, LossConfig, NonFinite
from megatron_rl.rollout_correction.correction import without_stale
from megatron_rl.types import Scored

IDS = {"ids": lambda x: x if isinstance(x, str) else ""}


@pytest.mark.parametrize(
    ("framework", "what", "mapping", "formula"),
    [(framework, *case) for framework, cases in CASES.items() for case in cases],
    **IDS,
)
def test_same_as_theirs(framework: str, what: str, mapping: Native, formula: Formula) -> None:
    config = translate(framework, mapping).config
    assert not config.rebaseline
    acted = False
    every_B = torch.ones_like(ADVANTAGES, dtype=torch.bool)
    for seed in range(4):
        prox_BT, mu_BT, mask_BT = data(seed)
        found = rollout_correction(
            prox_BT, mu_BT, mask_BT, config, judge=lambda _: (ADVANTAGES, every_B)
        )
        theirs = formula(Theirs(prox_BT, mu_BT, mask_BT))
        weights, counted_BT = theirs if isinstance(theirs, tuple) else (theirs, mask_BT)
        counted_BT = counted_BT & mask_BT
        multiplier_BT = (weights * counted_BT).float()
        torch.testing.assert_close(found.weights_BT, multiplier_BT, rtol=1e-5, atol=1e-6)
        assert int(found.denominator_mask_BT.sum()) == int(counted_BT.sum())
        acted |= not torch.allclose(multiplier_BT[mask_BT], torch.ones(()))
    assert acted == (what not in ("off", "decoupled, nothing else"))


@pytest.mark.parametrize("band_high", [None, 1.2])
def test_m2po(band_high: float | None) -> None:
    """AReaL masks the largest second moments until the mean of the rest is below the threshold.

    A band of token ratios then zeroes weights among the rest and leaves the denominators alone.
    """
    rejection = {} if band_high is None else areal(metric="ratio", upper=band_high)
    actor = {"use_decoupled_loss": True, "m2_threshold": 0.04, **rejection}
    config, notes, *_ = translate("areal", {"actor": actor})
    prox_BT, mu_BT, mask_BT = data(0)
    m2_BT = (prox_BT - mu_BT).square()
    ordered = m2_BT[mask_BT].sort(descending=True).values
    masked = next(k for k in range(len(ordered)) if ordered[k:].mean() < 0.04)
    counted_BT = mask_BT & (m2_BT <= ordered[masked])
    rho_BT = (prox_BT - mu_BT).exp()
    multiplier_BT = counted_BT * (1.0 if band_high is None else rho_BT * (rho_BT <= band_high))
    found = rollout_correction(prox_BT, mu_BT, mask_BT, config)
    assert 0 < masked < len(ordered)
    assert torch.equal(found.denominator_mask_BT, counted_BT)
    torch.testing.assert_close(found.weights_BT, multiplier_BT.float(), rtol=1e-5, atol=1e-6)
    assert "micro-batch" in notes[0]


def loss_of(wanted: dict[str, Any], **else_: Any) -> LossConfig:
    return from_mapping(
        {
            "loss": {
                "clip_low": 0.2,
                "clip_high": 0.2,
                **else_,
                **wanted,
            }
        }
    ).loss


@pytest.mark.parametrize(("framework", "mapping", "name", "native"), TWO_POLICIES, **IDS)
def test_losses_with_two_policies(
    framework: str, mapping: Native, name: str, native: Callable[[Theirs], Tensor]
) -> None:
    config, _, wanted, _ = translate(framework, mapping)
    assert wanted.get("name", name) == name
    loss_config = loss_of(wanted, name=name)
    for seed in range(4):
        pi_BT, mu_BT, mask_BT = data(seed)
        start = rollout_correction(None, mu_BT, mask_BT, config)
        theirs = Theirs(pi_BT, mu_BT, mask_BT)
        inputs = inputs_of(pi_BT, mu_BT, mu_BT, start, ADVANTAGES.double())
        loss, _ = policy_loss(inputs, loss_config, correction=config)
        losses_BT = native(theirs)
        expected = (
            theirs.average(losses_BT).mean()
            if name == "gspo"
            else theirs.sum(losses_BT).sum() / mask_BT.sum()
        )
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)


def geo_mean_rows(x: Theirs, pi: Theirs) -> Tensor:
    sign = pi.a.sign()
    row = pi.average(sign * torch.minimum(sign * pi.d, sign * pi.d.clamp(-0.2, 0.2)))
    return (-pi.a * row.exp() * x.average(x.rho.clamp(max=2.0).log()).exp()).expand_as(x.d)


def sapo_tokens(x: Theirs, pi: Theirs) -> Tensor:
    tau = torch.where(pi.a > 0, 1.0, 1.05)
    return -pi.a * torch.sigmoid(tau * (pi.rho - 1)) * 4 / tau * x.rho.clamp(max=2.0)


def gspo_tokens(x: Theirs, pi: Theirs) -> Tensor:
    return pi.surrogate(pi.mean.log()).expand_as(x.d) * x.rho.clamp(max=2.0)


@pytest.mark.parametrize(
    ("mode", "name", "tokens"),
    [
        ("gspo", "gspo", gspo_tokens),
        ("sapo", "sapo", sapo_tokens),
        ("geo_mean", "gmpo", geo_mean_rows),
    ],
)
def test_verl_losses_that_divide_by_all_rows(
    mode: str, name: str, tokens: Callable[..., Tensor]
) -> None:
    """Each row by its own tokens, then by every row of the batch, rejected ones among them."""
    section = {"rollout_is": "token", **verl_rs("seq_mean_k1", "0.8_1.25")}
    config, notes, wanted, _ = translate(
        "verl", {**verl_run(section, loss=mode), "loss_agg_mode": "token-mean"}
    )
    assert notes[-1] == f"goes with loss.name: {name}, loss.reduction: seq_mean_token_mean"
    loss_config = loss_of(wanted)
    prox_BT, mu_BT, mask_BT = data(0)
    pi_BT = prox_BT + 0.3 * torch.randn(
        mask_BT.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64
    )
    found = rollout_correction(prox_BT, mu_BT, mask_BT, config)
    assert 0 < int(found.rejected_B.sum()) < len(mask_BT)
    loss, _ = policy_loss(
        inputs_of(
            pi_BT,
            prox_BT,
            mu_BT,
            found,
            ADVANTAGES.double(),
        ),
        loss_config,
    )
    correction = Theirs(prox_BT, mu_BT, mask_BT)
    losses_B1 = correction.average(tokens(correction, Theirs(pi_BT, prox_BT, mask_BT)))
    expected = (losses_B1 * band(1 / correction.mean, 0.8, 1.25)).sum() / len(mask_BT)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)


def k3(pi: Theirs) -> Tensor:
    return (-pi.d).exp() - 1 + pi.d


def k3_by_both(pi: Theirs, x: Theirs) -> Tensor:
    """The gradient flows through the ratio too."""
    return (pi.p - x.p).exp() * k3(pi)


def capped(pi: Theirs, x: Theirs) -> Tensor:
    """The gradient of KL(pi || ref) on tokens that p has sampled, weighted by at most 10."""
    weight = (pi.d - x.d).exp().clamp(max=10.0).detach()
    return weight * (pi.d.detach() * pi.p)


@pytest.mark.parametrize(
    ("framework", "mapping", "kl"),
    [
        ("trl", {"beta": 1.0, "use_vllm": False}, k3_by_both),
        ("slime", {"use_unbiased_kl": True, "kl_loss_type": "k3"}, k3_by_both),
        ("openrlhf", {"algo.kl.unbiased_gradient": True}, capped),
        (
            "nemo_rl",
            {"reference_policy_kl_penalty": 1.0},
            lambda pi, _: (pi.p - pi.p.detach()).exp() * k3(pi),
        ),
    ],
)
def test_gradients_of_a_kl_that_is_weighted(
    framework: str, mapping: Native, kl: Callable[[Theirs, Theirs], Tensor]
) -> None:
    """By their formula, differentiated as they do."""
    config, _, wanted, _ = translate(framework, mapping)
    p_BT, ref_BT, mask_BT = data(3)
    pi_BT = (p_BT + 0.5 * data(4)[0].cos()).requires_grad_()
    found = rollout_correction(p_BT, p_BT, mask_BT, config)
    inputs = replace(
        inputs_of(pi_BT, p_BT, p_BT, found, ADVANTAGES.double() * 0), ref_logprobs_BT=ref_BT
    )
    ours, _ = policy_loss(inputs, loss_of(wanted, kl_coef=1.0))
    pi = Theirs(pi_BT, ref_BT, mask_BT)
    theirs = (kl(pi, Theirs(p_BT, ref_BT, mask_BT)) * mask_BT).sum() / mask_BT.sum()
    gradients = [torch.autograd.grad(loss, pi_BT)[0] for loss in (ours, theirs)]
    torch.testing.assert_close(*gradients)
    assert gradients[0].abs().max() > 1e-3


ERROR = {"grpo.seq_logprob_error_threshold": 1.4}
IN_LOSS = {**verl_rs("seq_mean_k1", "1.1"), "loss_type": "reinforce", "rollout_is": "token"}
COVARIANCE = [{"policy_loss_type": loss} for loss in ("clip_cov", "kl_cov")]
DECOUPLED = {"use_decoupled_loss": True, **areal(upper=2.0)}
# two ways to say one correction
SAME: list[tuple[str, Native, Native]] = [
    (
        "verl",
        {"rollout_is": "token", "use_policy_gradient": False},
        {"rollout_is": "token"},
    ),
    (
        "verl",
        {"rollout_rs": ["token_k1", "seq_max_k2"], "rollout_rs_threshold": ["0.5_2.0", 0.1]},
        verl_rs("token_k1,seq_max_k2", "0.5_2.0,0.1"),
    ),
    (
        "verl",
        {LOSS: "bypass_mode"},
        {"bypass_mode": True},
    ),
    (
        "verl",
        verl_run({"bypass_mode": True}, use_v1=True),
        {"bypass_mode": True},
    ),
    (
        "verl",
        verl_in_loss("vanilla", **IN_LOSS),
        {},
    ),
    (
        "verl",
        verl_run({"bypass_mode": True}, use_v1=False) | verl_in_loss(**IN_LOSS),
        {"bypass_mode": True},
    ),
    # the legacy trainer puts its loss in place
    (
        "verl",
        verl_run(
            {"bypass_mode": True, **verl_rs("token_k2", "1")},
            loss="gspo",
            use_v1=False,
        ),
        {"bypass_mode": True, **verl_rs("token_k2", "1")},
    ),
    *(
        ("skyrl", skyrl(loss, outlier_token_is_threshold_low=0.5, **TOKEN_MASK), {})
        for loss in COVARIANCE
    ),
    (
        "trl",
        {"beta": 0.1, "use_vllm": True},
        {"use_vllm": True},
    ),
    (
        "areal",
        {"actor": {**DECOUPLED, "prox_logp_method": "reuse_train_logp"}},
        {"actor": DECOUPLED},
    ),
    (
        "slime",
        {OLD: True},
        {"partial_rollout": True, OLD: True},
    ),
    ("openrlhf", openrlhf(level=False), openrlhf(enable=False)),  # as YAML reads off
    (
        "openrlhf",
        openrlhf(mode="clip", threshold=[0.5, 2.0]),
        openrlhf(enable=False),
    ),
]


@pytest.mark.parametrize(("framework", "one", "other"), SAME)
def test_what_is_the_same(framework: str, one: Native, other: Native) -> None:
    assert translate(framework, one).config == translate(framework, other).config


def test_anchors_of_areal() -> None:
    plain = {"use_decoupled_loss": False, "prox_logp_method": "reuse_train_logp"}
    for actor, anchor in (
        (DECOUPLED | {"prox_logp_method": "loglinear"}, "interpolated"),
        (plain, "prox"),
        (plain | {"use_sapo_loss": True}, "sampler"),
    ):
        assert translate("areal", {"actor": actor}).config.anchor == anchor


SLIME_RS = slime_mis(tis_upper_bound=2.0, use_rs=True)
COUNTED = "loss.kl_on"
# a key that a note names, settings that have the note, and settings that do not
NOTES: list[tuple[str, str, Native, Native]] = [
    (
        "verl",
        "defaults",
        {"defaults": ["ppo_trainer"], "algorithm.rollout_correction": {}},
        {},
    ),
    (
        "verl",
        "rollout_is_threshold",
        {"rollout_is": "token", "rollout_is_threshold": "null"},
        {},
    ),
    (
        "verl",
        "renormalize",
        verl_rs("token_k2", "1"),
        {},
    ),
    (
        "verl",
        "use_v1",
        {"bypass_mode": True, **verl_rs("token_k2", "1")},
        {"bypass_mode": True},
    ),
    (
        "verl",
        "use_v1",
        verl_in_loss("vanilla", **IN_LOSS),
        {},
    ),
    (
        "skyrl",
        COUNTED,
        {"sequence_mask_metric": "geometric"},
        {"tis_ratio_type": "token"},
    ),
    (
        "trl",
        "use_vllm",
        {},
        {"use_vllm": True},
    ),
    (
        "trl",
        COUNTED,
        {"off_policy_mask_threshold": 0.1},
        trl(mode="token_mask"),
    ),
    (
        "nemo_rl",
        "use_importance_sampling_correction",
        nemo(type="tis", ratio=1.5),
        NEMO_ON,
    ),
    (
        "nemo_rl",
        COUNTED,
        nemo(type="seq-mask-tis", ratio=1.2, ratio_min=0.8),
        ERROR,
    ),
    (
        "areal",
        "use_decoupled_loss",
        areal(),
        {"use_decoupled_loss": True},
    ),
    (
        "areal",
        "learner.n_minibatches",
        {"prox_logp_method": "reuse_train_logp"},
        {},
    ),
    (
        "slime",
        "use_opsm",
        {"use_opsm": True},
        {},
    ),
    (
        "slime",
        "custom_tis_function_path",
        {"use_tis": True, "tis_upper_bound": 2.0},
        SLIME_RS,
    ),
    (
        "slime",
        COUNTED,
        {"use_opsm": True},
        SLIME_RS,
    ),
    (
        "slime",
        "tis_mode",
        slime_mis(tis_upper_bound=2.0, tis_mode="mask"),
        SLIME_RS,
    ),
    (
        "slime",
        "partial_rollout",
        {OLD: True},
        {},
    ),
    (
        "openrlhf",
        "is_correction_enable",
        openrlhf(type="tis"),
        openrlhf(enable=True),
    ),
    (
        "openrlhf",
        COUNTED,
        openrlhf(type="seq-mask-tis"),
        openrlhf(type="icepop"),
    ),
    (
        "fireworks",
        COUNTED,
        {"tis": {"cap": 1.2, "icepop_threshold": 2.0}},
        {"tis": {"icepop_threshold": 2.0}},
    ),
]


@pytest.mark.parametrize(("framework", "key", "mapping", "other"), NOTES)
def test_notes(framework: str, key: str, mapping: Native, other: Native) -> None:
    """Conditions, guesses at what is not given, and sections that are not there."""
    assert any(key in note for note in translate(framework, mapping).notes)
    assert not any(key in note for note in translate(framework, other).notes)


# a row without one logprob, one whose sampler calls its token impossible, a whole one
FAULTY_BT = torch.tensor(
    [
        [-1.0, math.nan, -1.0],
        [-1.0, -1.0, -math.inf],
        [-1.0, -1.0, -1.0],
    ]
)
PROX_BT = torch.full((3, 3), -1.0)
MASK_BT = torch.ones(3, 3, dtype=torch.bool)
SOUND_BT = FAULTY_BT.isfinite()
WHOLE_BT = FAULTY_BT.isfinite().all(1, keepdim=True).expand(3, 3)
AREAL_BAND = {"use_decoupled_loss": True, "m2_threshold": 0.05}
MISSING: list[tuple[str, Native, Tensor, Tensor]] = [  # weights, and what is divided by
    (
        "verl",
        {},
        MASK_BT,
        MASK_BT,
    ),
    (
        "trl",
        trl(mode="token_truncate", clip_max=1.0),
        MASK_BT,
        MASK_BT,
    ),
    (
        "nemo_rl",
        NEMO_ON,
        SOUND_BT,
        MASK_BT,
    ),
    (
        "nemo_rl",
        ERROR | NEMO_ON,
        WHOLE_BT,
        WHOLE_BT,
    ),
    (
        "areal",
        areal(),
        MASK_BT,
        MASK_BT,
    ),
    (
        "areal",
        areal(metric="kl_k2"),
        SOUND_BT,
        MASK_BT,
    ),
    (
        "areal",
        areal(metric="kl_k1", level="sequence", upper=1.0, lower=-1.0),
        WHOLE_BT,
        WHOLE_BT,
    ),
    (
        "areal",
        {"actor": AREAL_BAND | areal(upper=2.0)},
        SOUND_BT,
        SOUND_BT,
    ),
]


@pytest.mark.parametrize(("framework", "mapping", "weights_BT", "denominator_BT"), MISSING)
def test_tokens_without_a_sampler_logprob(
    framework: str, mapping: Native, weights_BT: Tensor, denominator_BT: Tensor
) -> None:
    """They are trained, zeroed or left out where theirs are, alone or with their row."""
    found = rollout_correction(PROX_BT, FAULTY_BT, MASK_BT, translate(framework, mapping).config)
    assert torch.equal(found.weights_BT, weights_BT.float())
    assert torch.equal(found.denominator_mask_BT, denominator_BT)


@pytest.mark.parametrize(
    ("framework", "mapping", "total"),
    [
        ("trl", {}, 0.6),
        (
            "areal",
            areal(level="sequence", action="clamp", upper=9.0),
            0.2,
        ),
    ],
)
def test_a_token_without_a_sampler_logprob_in_a_weighted_row(
    framework: str, mapping: Native, total: float
) -> None:
    """It counts as d = 0 in the row; its own weight is 1 here, and the row's there."""
    mu_BT = torch.tensor([[-1.4, math.nan, -1.2]])
    weights_BT = rollout_correction(
        PROX_BT[:1], mu_BT, MASK_BT[:1], translate(framework, mapping).config
    ).weights_BT
    torch.testing.assert_close(weights_BT, torch.tensor([[math.exp(total), 1.0, math.exp(total)]]))


def answer(sample: int, versions: list[int]) -> Scored:
    tokens = len(versions)
    one = rollout(
        [1] * tokens,
        sample=sample,
        logprobs=[-0.1 * (sample + 1)] * tokens,
        policy_version=versions[0],
        versions=versions,
    )
    return Scored(one, float(sample))


def test_slime_s_partial_rollouts_train_on_what_the_last_call_has_written() -> None:
    """A call that resumes a response masks its earlier tokens, and all complete responses."""
    calls = [[3, 3, 4, 4], [2, 2], [4, 4, 4]]
    batch = collate([answer(sample, versions) for sample, versions in enumerate(calls)])
    mu_BT = matrix(batch.sampler_logprobs_N, batch.response_lengths_B)
    prox_BT = mu_BT + torch.tensor([[2.0, 2.0, 0.1, 0.2], [0.0] * 4, [0.3] * 4])
    rules = slime_mis(tis_upper_bound=1.5, tis_level="sequence", use_rs=True, rs_level="geometric")
    config = translate("slime", {"partial_rollout": True, OLD: True, **rules}).config
    young, _ = without_stale(batch, config, version=4)
    theirs_BT = torch.tensor([[0, 0, 1, 1], [0] * 4, [1, 1, 1, 0]]).bool()
    young_BT = matrix(young.mask_N, batch.response_lengths_B)
    assert torch.equal(young_BT, theirs_BT)
    found = rollout_correction(prox_BT, mu_BT, young_BT, config)
    weights_BT = torch.tensor([math.exp(0.3), 0.0, 1.5])[:, None] * theirs_BT
    torch.testing.assert_close(found.weights_BT, weights_BT)
    assert torch.equal(found.denominator_mask_BT, theirs_BT)
    alone = translate("slime", {OLD: True}).config
    assert (alone.weight.level, alone.non_finite) == (Level.none, NonFinite.one)


SC = {"bypass_mode": True, "loss_type": "reinforce", "score_centering": True}
CENTERED = [
    ("verl", {"algorithm": {"rollout_correction": SC}}),
    ("verl", {"algorithm": {"rollout_correction": SC | {"rollout_is": "token"}}}),
    ("prime_rl", {"trainer": {"loss": {"type": "ipo", "score_centering": True}}}),
    ("nemo_rl", {"loss_fn": NEMO_ON | {"score_centering": True}}),
    ("skyrl", {"trainer": {"algorithm": {"score_centering": {"enabled": True}}}}),
    ("slime", {"use_score_centering": True, "use_tis": True}),
]


@pytest.mark.parametrize(("framework", "mapping"), CENTERED)
def test_score_centering(framework: str, mapping: Native) -> None:
    found = translate(framework, mapping)
    assert found.config.center == "top_logprobs"
    loss = loss_of(found.loss, name=found.loss.get("name", "ppo"))
    assert not check_objective(found.config, loss)


def test_verl_centers_only_a_policy_gradient_in_bypass_mode() -> None:
    mapping = {"algorithm": {"rollout_correction": SC | {"loss_type": "ppo_clip"}}}
    with pytest.raises(
        ConfigError, match=r"score_centering .*bypass_mode and loss_type: reinforce"
    ):
        translate("verl", mapping)
