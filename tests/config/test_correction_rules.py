"""Bad configs are refused with the key's path, its value and the way out, before torch is
needed.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from helpers import program

from megatron_rl.config.correction_rules import (
    check_correction,
    check_loss,
    check_objective,
)
from megatron_rl.config.load import check
from megatron_rl.config.schema import (
    GROUP_ESTIMATORS,
    AdvantageConfig,
    Config,
    CorrectionConfig,
    EnvironmentSection,
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


NAN = float("nan")
INF = float("inf")


def alone(**wrong: Sequence[object]) -> Iterator[tuple[dict[str, object], str]]:
    """Each value by itself, and how a complaint of it begins."""
    for key, values in wrong.items():
        for value in values:
            yield (
                {key: value},
                f"{key} is {json.dumps(value) if value is None or value is True else value}",
            )


WEIGHTS = [
    *alone(
        high=(-1.0, 0.0, NAN, "2_0"),
        low=(-0.5,),
        level=("row",),
        aggregate=("geometric",),
        target_ess=(1.5, 0.0),
    ),
    *alone(outside=("drop",)),
    ({"low": 2.0, "high": 2.0}, "low is 2.0"),
    ({"aggregate": "median", "level": "sequence"}, "aggregate is median"),
    ({"outside": "zero", "high": None}, "outside is zero"),
    ({"outside": "zero", "level": "none"}, "outside is zero"),
    ({"outside": "zero", "low": "0_5"}, "low is 0_5"),
    ({"normalize": True, "level": "none"}, "normalize is true"),
    ({"target_ess": 0.9, "outside": "zero"}, "target_ess is 0.9"),
    ({"target_ess": 0.9, "level": "none"}, "target_ess is 0.9"),
    ({"target_ess": 0.9, "high": 0.5}, "high is 0.5"),
    ({"target_ess": 0.9, "low": 1.2, "high": 4.0}, "low is 1.2"),
]
RULES = [
    *alone(
        stat=(None, "k4"),
        level=("none",),
        reduce=(None, "median"),
        when=("always",),
    ),
    *alone(low=(-0.1, 1.2)),
    ({"level": "token"}, "reduce is mean"),
    *(({"level": level, "reduce": None}, "reduce is null") for level in ("turn", "prefix")),
    ({"stat": "binary_kl", "low": -0.1, "high": None}, "low is -0.1"),
    ({"low": 0.5, "high": 0.01}, "low is 0.5"),
    *(({"stat": "abs", "low": None, "high": high}, f"high is {high}") for high in (0.9, 1.0)),
    *(
        ({"low": None, "high": None, "budget": budget}, f"budget is {budget}")
        for budget in (-0.1, NAN)
    ),
    ({"stat": "abs", "low": None, "high": None, "budget": 0.5}, "budget is 0.5"),
    ({"stat": "m2", "low": None, "high": None, "budget": 0.0}, "budget is 0.0"),
    ({"stat": "k2", "low": None, "high": 0.0}, "high is 0.0"),
    ({"low": None, "high": None, "budget": 0.1, "when": "negative_advantage"}, "when is"),
    ({"stat": "staleness", "low": None, "high": -1}, "high is -1"),
    ({"stat": "staleness", "low": None, "when": "negative_advantage"}, "when is negative"),
    ({"stat": "staleness", "low": None, "high": None, "budget": 1.0}, "budget is 1.0"),
]


@pytest.mark.parametrize(
    ("config", "path"),
    [
        *((weight(**keys), f"correction.weight.{said}") for keys, said in WEIGHTS),
        *((rule(**keys), f"correction.reject[1].{said}") for keys, said in RULES),
        (rule(low=None, high=None), "correction.reject[1] is ratio without bounds"),
        (CorrectionConfig(anchor="old"), "correction.anchor is old"),  # type: ignore[arg-type]
        (CorrectionConfig(non_finite="ignore"), "correction.non_finite is ignore"),  # type: ignore[arg-type]
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_corrections_that_are_refused(config: CorrectionConfig, path: str) -> None:
    (found,) = check_correction(config)
    assert found.startswith(path)
    assert ": " in found.removeprefix(path)  # and the way out


BYPASS = CorrectionConfig(
    anchor="sampler", weight=WeightConfig(level="none"), rebaseline=False, renormalize=False
)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        *(({key: True}, f"correction.{key} is true") for key in ("rebaseline", "renormalize")),
        ({"weight": WeightConfig(normalize=True)}, "correction.weight.normalize is true"),
        ({"weight": WeightConfig(target_ess=0.9)}, "correction.weight.target_ess is 0.9"),
        (
            {"reject": [RejectRule(level="token", stat="m2", budget=0.1)]},
            "correction.reject[0].budget is 0.1",
        ),
    ],
)
def test_the_sampler_anchor_refuses_what_needs_the_global_batch(change: dict, key: str) -> None:
    assert check_correction(replace(BYPASS, reject=[RULE])) == []
    (found,) = check_correction(replace(BYPASS, **change))
    assert found.startswith(key)


def test_losses_and_anchors() -> None:
    prox = CorrectionConfig()
    assert check_objective(BYPASS, LossConfig(name="rollout_is")) == []
    assert check_objective(prox, LossConfig(name="rollout_is"))[0].startswith("loss.name is")
    assert check_objective(BYPASS, LossConfig(name="kl_cov"))[0].startswith("loss.name is kl_cov")


LOSSES = [
    *alone(
        name=("ppo2",),
        clip_low=(-0.1, 1.2, None),
        clip_high=(-0.1, "0.28"),
    ),
    *alone(
        reduction=("mean",),
        kl_coef=(-1.0,),
        kl_estimator=("k4",),
        entropy_coef=(INF,),
    ),
    ({"name": "cispo", "params": {"absolute": True}, "clip_high": 0.0}, "clip_high is 0.0"),
    *(
        ({"reduction": "token_mean", "name": name}, "reduction is token_mean")
        for name in ("gspo", "gmpo")
    ),
    ({"name": "rollout_is", "clip_high": 0.0}, "clip_high is 0"),
    ({"name": "gspo", "level": "turn"}, "level is turn"),
    ({"level": "none"}, "level is none"),
    ({"aggregate": "geometric"}, "aggregate is geometric"),
    *(
        ({"kl_cap": 5.0, **keys}, "kl_cap is 5.0")
        for keys in ({}, {"kl_coef": 0.1, "kl_to": "sampler"})
    ),
]
PARAMS = {
    "ppo": [
        ("dual_clip", 0.9),
        ("dual_clip", "3"),
        ("dual_clipp", 3.0),
        ("absolute", True),
    ],
    "cispo": [("absolute", 1), ("dual_clip", 3.0)],
    "sapo": [("tau_negative", None), ("tau_positive", 0.0)],
    "dppo": [("trust_region", "ball")],
    "clip_cov": [("cov_fraction", NAN), ("cov_fraction", 1.5), ("cov_low", 5.0)],
    "kl_cov": [("cov_kl_coef", -1.0)],
    "vespo": [("gamma_positive", [2.0]), ("gamma_negative", [1, "x"])],
}


@pytest.mark.parametrize(
    ("name", "key", "value"), [(name, *one) for name, given in PARAMS.items() for one in given]
)
def test_parameters_that_are_refused(name: str, key: str, value: object) -> None:
    """Parameters of the wrong type, out of bounds, or of another loss are refused."""
    (found,) = check_loss(LossConfig(name=name, params={key: value}))  # type: ignore[arg-type]
    assert re.match(rf"loss\.params\.{key}(:| is )", found)


def test_parameters_are_those_of_the_loss() -> None:
    """Defaults of another loss's parameters, which a base or a recorded run names, go."""
    assert LossConfig().params == {"dual_clip": None}
    given = {"tau_positive": 2.0, "dual_clip": None}
    assert LossConfig(name="sapo", params=given).params == {
        "tau_positive": 2.0,
        "tau_negative": 1.05,
    }
    (found,) = check_loss(LossConfig(params={"dual_clipp": 3.0}))
    assert "loss.params.dual_clip?" in found


@pytest.mark.parametrize(("config", "said"), LOSSES)
def test_losses_that_are_refused(config: dict, said: str) -> None:
    (found,) = check_loss(LossConfig(**config))
    assert found.startswith(f"loss.{said}")


ALONE = RolloutSection(samples_per_prompt=1)
COMPARES = "rollout.samples_per_prompt is 1: advantage.estimator: {} compares"
TURNS = EnvironmentSection(name="my.room:Game", credit="turns")  # type: ignore[arg-type]


def estimated(name: str, **sections: object) -> Config:
    return Config(advantage=AdvantageConfig(name), **sections)  # type: ignore[arg-type]


GIVEN = replace(ALONE, source=RolloutSource.dataset)
WARM_START = estimated("none", rollout=GIVEN, loss=LossConfig(name="cross_entropy"))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (estimated("none"), "advantage.estimator is none: every sampled response would count"),
        (
            replace(WARM_START, correction=BYPASS),
            "correction.anchor is sampler: the data set's own answers",
        ),
        (
            replace(WARM_START, reward=RewardSection(learner_estimate=True)),
            "reward.learner_estimate is true: the data",
        ),
        (
            estimated("maxrl", reward=RewardSection(wrong=-1.0)),
            "reward.wrong is -1.0: advantage.estimator: maxrl div",
        ),
        (
            estimated("maxrl", reward=RewardSection(overlong_buffer=4)),
            "advantage.estimator is maxrl: it divides by",
        ),
        (estimated("reinforce_pp", rollout=ALONE), "rollout.dynamic_sampling is true: a group of"),
        (
            Config(environment=TURNS, correction=rule(when="negative_advantage")),
            "environment.credit is turns: a `when` of the",
        ),
        *(
            (estimated(name, rollout=ALONE), COMPARES.format(name))
            for name in sorted(GROUP_ESTIMATORS)
        ),
    ],
)
def test_sections_that_do_not_go_together(config: Config, said: str) -> None:
    (found,) = check(config)
    assert found.startswith(said)
    assert check(WARM_START) == []


def test_defaults_and_plain_strings_are_clean() -> None:
    assert check(Config()) == []
    # of sampled answers: self-imitation
    assert check(Config(loss=LossConfig(name="cross_entropy"))) == []
    # odd, but it says what it does
    assert check_correction(rule(stat="k2", low=0.1, high=None)) == []
    for level, outside in itertools.product(["token", "sequence"], ["truncate", "zero"]):
        assert check_correction(weight(level=level, outside=outside, low=0.5)) == []
    for name in (
        "gspo",
        "gmpo",
        "cispo",
        "sapo",
        "dppo",
        "clip_cov",
        "kl_cov",
        "reinforce",
        "cross_entropy",
    ):
        assert check_objective(CorrectionConfig(), LossConfig(name=name)) == [], name


def test_checks_and_translation_need_no_torch() -> None:
    code = (
        "import sys, megatron_rl.config.correction_rules, "
        "megatron_rl.apps.translation.translate; sys.exit('torch' in sys.modules or 'numpy' "
        "in sys.modules)"
    )
    program(code)
