"""Bad configs are refused with the key's path, its value and the way out, before torch is needed."""

from __future__ import annotations

import itertools
import subprocess
import sys
from dataclasses import replace

import pytest

from megatron_rl.config.correction_rules import check_advantage, check_correction, check_loss, check_objective
from megatron_rl.config.rules import check
from megatron_rl.config.schema import (
    GROUP_ESTIMATORS,
    AdvantageConfig,
    Config,
    CorrectionConfig,
    LossConfig,
    RejectRule,
    RewardSection,
    RolloutSection,
    RolloutSource,
    WeightConfig,
)

RULE = RejectRule(stat="ratio", reduce="mean", low=0.9, high=1.1)


def weight(**keys: object) -> CorrectionConfig:
    return CorrectionConfig(weight=WeightConfig(**keys))  # type: ignore[arg-type]


def rule(**keys: object) -> CorrectionConfig:
    return CorrectionConfig(reject=[RULE, replace(RULE, **keys)])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("config", "path"),
    [
        (weight(high=-1.0), "correction.weight.high is -1.0"),
        (weight(high=0.0), "correction.weight.high is 0.0"),
        (weight(high=float("nan")), "correction.weight.high is nan"),
        (weight(high="2_0"), "correction.weight.high is 2_0"),
        (weight(low=-0.5), "correction.weight.low is -0.5"),
        (weight(low=2.0, high=2.0), "correction.weight.low is 2.0"),
        (weight(level="row"), "correction.weight.level is row"),
        (weight(aggregate="geometric"), "correction.weight.aggregate is geometric"),
        (weight(aggregate="median", level="sequence"), "correction.weight.aggregate is median"),
        (weight(outside="zero", high=None), "correction.weight.outside is zero"),
        (weight(outside="zero", level="none"), "correction.weight.outside is zero"),
        (weight(normalize=True, level="none"), "correction.weight.normalize is true"),
        (weight(target_ess=0.9, outside="zero"), "correction.weight.target_ess is 0.9"),
        (weight(target_ess=0.9, level="none"), "correction.weight.target_ess is 0.9"),
        (weight(target_ess=1.5), "correction.weight.target_ess is 1.5"),
        (weight(target_ess=0.0), "correction.weight.target_ess is 0.0"),
        (weight(target_ess=0.9, high=0.5), "correction.weight.high is 0.5"),
        (weight(target_ess=0.9, low=1.2, high=4.0), "correction.weight.low is 1.2"),
        (rule(low=1.2, high=1.1), "correction.reject[1].low is 1.2"),
        (rule(low=None, high=None), "correction.reject[1] is ratio without bounds"),
        (rule(stat=None), "correction.reject[1].stat is null"),
        (rule(stat="k4"), "correction.reject[1].stat is k4"),
        (rule(level="none"), "correction.reject[1].level is none"),
        (rule(reduce=None), "correction.reject[1].reduce is null"),
        (rule(level="token"), "correction.reject[1].reduce is mean"),
        (rule(when="always"), "correction.reject[1].when is always"),
        (rule(budget=0.1), "correction.reject[1].budget is 0.1"),
        (rule(low=None, high=None, budget=-0.1), "correction.reject[1].budget is -0.1"),
        (rule(low=None, high=None, budget=0.1, when="negative_advantage"), "correction.reject[1].when is"),
        (rule(low=-0.1), "correction.reject[1].low is -0.1"),
        (rule(stat="abs", low=None, high=0.9), "correction.reject[1].high is 0.9"),
        (weight(outside="zero", low="0_5"), "correction.weight.low is 0_5"),
        (rule(low=0.5, high=0.01), "correction.reject[1].low is 0.5"),
        (rule(stat="abs", low=None, high=1.0), "correction.reject[1].high is 1.0"),
        (rule(stat="abs", low=None, high=None, budget=0.5), "correction.reject[1].budget is 0.5"),
        (rule(low=None, high=None, budget=float("nan")), "correction.reject[1].budget is nan"),
        (rule(stat="staleness", low=None, high=-1), "correction.reject[1].high is -1"),
        (rule(stat="staleness", low=None, when="negative_advantage"), "correction.reject[1].when is negative"),
        (rule(stat="staleness", low=None, high=None, budget=1.0), "correction.reject[1].budget is 1.0"),
        (CorrectionConfig(anchor="old"), "correction.anchor is old"),  # type: ignore[arg-type]
        (CorrectionConfig(non_finite="ignore"), "correction.non_finite is ignore"),  # type: ignore[arg-type]
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_corrections_that_are_refused(config: CorrectionConfig, path: str) -> None:
    found = check_correction(config)
    assert len(found) == 1, found
    assert found[0].startswith(path)
    assert ": " in found[0].removeprefix(path)  # and the way out


def test_all_problems_are_reported_at_once() -> None:
    reject = [replace(RULE, reduce=None), replace(RULE, stat="k4")]
    config = CorrectionConfig(weight=WeightConfig(low=-1.0, high=-2.0), reject=reject)
    assert len(check_correction(config)) == 4


BYPASS = CorrectionConfig(anchor="sampler", weight=WeightConfig(level="none"), rebaseline=False, renormalize=False)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"rebaseline": True}, "correction.rebaseline is true"),
        ({"renormalize": True}, "correction.renormalize is true"),
        ({"weight": WeightConfig(normalize=True)}, "correction.weight.normalize is true"),
        ({"weight": WeightConfig(target_ess=0.9)}, "correction.weight.target_ess is 0.9"),
        ({"reject": [RejectRule(level="token", stat="m2", budget=0.1)]}, "correction.reject[0].budget is 0.1"),
    ],
)
def test_the_sampler_anchor_refuses_what_needs_the_global_batch(change: dict, key: str) -> None:
    assert check_correction(replace(BYPASS, reject=[RULE])) == []
    found = check_correction(replace(BYPASS, **change))
    assert len(found) == 1, found
    assert found[0].startswith(key)


def test_a_weight_on_top_of_a_ratio_is_refused() -> None:
    config = replace(BYPASS, weight=WeightConfig(level="token"))
    found = check_objective(config, LossConfig(), AdvantageConfig())
    assert len(found) == 1
    assert found[0].startswith("correction.weight.level is token")
    assert check_objective(config, LossConfig(name="reinforce"), AdvantageConfig()) == []


def test_losses_and_anchors() -> None:
    prox = CorrectionConfig()
    assert check_objective(BYPASS, LossConfig(name="rollout_is"), AdvantageConfig()) == []
    assert check_objective(prox, LossConfig(name="rollout_is"), AdvantageConfig())[0].startswith("loss.name is")
    assert check_objective(BYPASS, LossConfig(name="kl_cov"), AdvantageConfig())[0].startswith("loss.name is kl_cov")


@pytest.mark.parametrize(
    ("config", "path"),
    [
        ({"name": "ppo2"}, "loss.name is ppo2"),
        ({"clip_low": -0.1}, "loss.clip_low is -0.1"),
        ({"clip_low": 1.2}, "loss.clip_low is 1.2"),
        ({"clip_high": -0.1}, "loss.clip_high is -0.1"),
        ({"dual_clip": 0.9}, "loss.dual_clip is 0.9"),
        ({"dual_clip": 3.0, "name": "cispo"}, "loss.dual_clip is 3.0"),
        ({"absolute": True}, "loss.absolute is true"),
        ({"absolute": True, "name": "cispo", "clip_high": 0.0}, "loss.clip_high is 0.0"),
        ({"reduction": "mean"}, "loss.reduction is mean"),
        ({"reduction": "token_mean", "name": "gspo"}, "loss.reduction is token_mean"),
        ({"reduction": "token_mean", "name": "gmpo"}, "loss.reduction is token_mean"),
        ({"kl_coef": -1.0}, "loss.kl_coef is -1.0"),
        ({"kl_estimator": "k4"}, "loss.kl_estimator is k4"),
        ({"entropy_coef": float("inf")}, "loss.entropy_coef is inf"),
        ({"clip_low": None}, "loss.clip_low is null"),
        ({"clip_high": "0.28"}, "loss.clip_high is 0.28"),
        ({"name": "rollout_is", "clip_high": 0.0}, "loss.clip_high is 0"),
        ({"tau_negative": None}, "loss.tau_negative is null"),
        ({"cov_fraction": float("nan")}, "loss.cov_fraction is nan"),
        ({"cov_fraction": 1.5}, "loss.cov_fraction is 1.5"),
        ({"cov_high": float("nan")}, "loss.cov_high is nan"),
        ({"cov_kl_coef": float("inf")}, "loss.cov_kl_coef is inf"),
        ({"tau_positive": 0.0}, "loss.tau_positive is 0.0"),
        ({"trust_region": "ball"}, "loss.trust_region is ball"),
        ({"cov_fraction": 0.0}, "loss.cov_fraction is 0.0"),
        ({"cov_low": 5.0}, "loss.cov_low is 5.0"),
        ({"cov_kl_coef": -1.0}, "loss.cov_kl_coef is -1.0"),
    ],
)
def test_losses_that_are_refused(config: dict, path: str) -> None:
    found = check_loss(LossConfig(**config))
    assert len(found) == 1, found
    assert found[0].startswith(path)


def test_advantages() -> None:
    assert check_advantage(AdvantageConfig()) == []
    assert check_advantage(AdvantageConfig("gae"))[0].startswith("advantage.estimator is gae")  # type: ignore[arg-type]


WARM_START = Config(
    rollout=RolloutSection(source=RolloutSource.dataset, samples_per_prompt=1),
    loss=LossConfig(name="cross_entropy"),
    advantage=AdvantageConfig("none"),
)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (Config(advantage=AdvantageConfig("none")), "advantage.estimator is none: every sampled answer would count"),
        (replace(WARM_START, correction=BYPASS), "correction.anchor is sampler: the data set's own answers"),
        (replace(WARM_START, reward=RewardSection(learner_estimate=True)), "reward.learner_estimate is true: the data"),
        (Config(reward=RewardSection(overlong_penalty=-1.0)), "reward.overlong_penalty is -1.0: it is subtracted"),
        (Config(reward=RewardSection(overlong_buffer=-1)), "reward.overlong_buffer is -1: it is part of"),
        (Config(reward=RewardSection(overlong_buffer=513)), "reward.overlong_buffer is 513: it is part of"),
        (
            Config(advantage=AdvantageConfig("maxrl"), reward=RewardSection(wrong=-1.0)),
            "reward.wrong is -1.0: advantage.estimator: maxrl divides by the mean reward",
        ),
        (
            Config(advantage=AdvantageConfig("maxrl"), reward=RewardSection(overlong_buffer=4)),
            "advantage.estimator is maxrl: it divides by the mean reward",
        ),
        (
            Config(advantage=AdvantageConfig("reinforce_pp"), rollout=RolloutSection(samples_per_prompt=1)),
            "rollout.dynamic_sampling is true: a group of",
        ),
        *(
            (
                Config(advantage=AdvantageConfig(name), rollout=RolloutSection(samples_per_prompt=1)),
                f"rollout.samples_per_prompt is 1: advantage.estimator: {name} compares",
            )
            for name in sorted(GROUP_ESTIMATORS)
        ),
    ],
)
def test_sections_that_do_not_go_together(config: Config, said: str) -> None:
    found = check(config)[1]
    assert len(found) == 1, found
    assert found[0].startswith(said)
    assert check(WARM_START) == (WARM_START, [])


def test_defaults_and_plain_strings_are_clean() -> None:
    assert check(Config()) == (Config(), [])
    assert check(Config(loss=LossConfig(name="cross_entropy")))[1] == []  # of sampled answers: self-imitation
    assert check_correction(rule(stat="k2", low=0.1, high=None)) == []  # odd, but it says what it does
    for level, outside in itertools.product(["token", "sequence"], ["truncate", "zero"]):
        assert check_correction(weight(level=level, outside=outside, low=0.5)) == []
    for name in ("gspo", "gmpo", "cispo", "sapo", "dppo", "clip_cov", "kl_cov", "reinforce", "cross_entropy"):
        assert check_objective(CorrectionConfig(), LossConfig(name=name), AdvantageConfig()) == [], name


def test_checks_and_translation_need_no_torch() -> None:
    code = (
        "import sys, megatron_rl.config.correction_rules, megatron_rl.workshop.translation.translate; "
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)
