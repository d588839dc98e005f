"""prompt -> rollout -> reward -> group filter: unscored and truncated responses, refills."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from collectors import Script, collector
from rollouts import rollout

from megatron_rl.batch import Share, collate
from megatron_rl.config.sampling import TopLogprobsSection
from megatron_rl.config.schema import (
    AdvantageConfig,
    Config,
    CorrectionConfig,
    RewardSection,
    RolloutSection,
)
from megatron_rl.rollout.collect import (
    MOST_DETAILS,
    Collected,
    DatasetResponses,
    RewardError,
    _sampled,
    _task,
    _verdicts,
    sampling_params,
)
from megatron_rl.rollout.top_logprobs import top_metrics
from megatron_rl.rollout_correction.correction import correct, rollout_correction
from megatron_rl.types import Prompt, Scored, Session, SessionTurn

CORRECTION = CorrectionConfig()


def config(**keys: Any) -> Config:
    sizes = {"prompts_per_step": 1, "samples_per_prompt": 4, "max_gen_batches": 2}
    return Config(
        rollout=RolloutSection(**{**sizes, **keys.pop("rollout", {})}),
        advantage=AdvantageConfig("dr_grpo"),
        **keys,
    )


def collected(setting: Config, *groups: str) -> Collected:
    script = Script(*groups)
    rebaseline = setting.correction.rebaseline
    return collector(script, script, setting.rollout, setting.reward, rebaseline).collect(1)


@pytest.mark.parametrize("rebaseline", [True, False])
def test_an_answer_without_a_score_is_in_neither_the_mask_nor_the_baseline(
    rebaseline: bool,
) -> None:
    setting = config(correction=CorrectionConfig(rebaseline=rebaseline))
    found = collected(setting, "yn?y")
    batch = collate(found.scored)
    assert batch.mask_N.tolist() == [True, True, False, True]
    assert batch.rewards_B.isnan().tolist() == [False, False, True, False]
    correction, advantages_B, _ = correct(
        Share.alone(batch), batch.sampler_logprobs_N, setting.correction, setting.advantage
    )
    assert torch.allclose(advantages_B, torch.tensor([1 / 3, -2 / 3, 0.0, 1 / 3]))
    assert not correction.mask_N[2]
    assert not correction.denominator_mask_N[2]
    assert found.metrics["reward/errors"] == 1
    assert found.metrics["reward/mean"] == pytest.approx(2 / 3)


def test_a_missing_score_makes_no_spread() -> None:
    found = collected(config(), "nnn?", "ynnn")
    assert [one.text for one in found.scored] == list("ynnn")
    assert found.metrics["rollout/gen_batches"] == 2
    # the first, and three of the four that replaced it
    assert found.metrics["rollout/groups_all_wrong"] == 4
    every = collected(config(rollout={"dynamic_sampling": False}), "nnn?").metrics
    assert (every["rollout/groups_kept"], every["rollout/groups_all_wrong"]) == (0, 1)


@pytest.mark.parametrize(("rebaseline", "kept"), [(True, "ynnn"), (False, "yYNN")])
def test_truncated_answers_that_are_filtered(rebaseline: bool, kept: str) -> None:
    """With rebaseline they leave the baseline too, so a spread that only they make is none."""
    setting = config(
        correction=CorrectionConfig(rebaseline=rebaseline),
        reward=RewardSection(overlong_filter=True),
    )
    found = collected(setting, "yYNN", "ynnn")
    assert "".join(one.text for one in found.scored) == kept
    batch = collate(found.scored)
    trained_on = [letter.islower() for letter in kept]

    def judge(baseline_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert baseline_B.tolist() == trained_on
        return torch.zeros(len(batch)), torch.ones_like(baseline_B)

    correction = rollout_correction(batch, batch.sampler_logprobs_N, CORRECTION, judge=judge)
    assert correction.mask_N.tolist() == trained_on


def test_a_reward_that_never_works_stops_the_run() -> None:
    with pytest.raises(RewardError, match="none of 20 responses"):
        collected(config(), *["????"] * 5)


def test_names_of_a_reward_s_own_are_bounded_and_take_no_room_of_the_recipe_s() -> None:
    prompt = Prompt("0", (1,), "", {})
    one = rollout((1,), prompt=prompt)
    scored = [
        Scored(one, 1.0, details={f"own/{each:04}": 1.0, "part/style": 0.5}) for each in range(1000)
    ]
    metrics = _verdicts(scored)
    assert metrics["reward/part/style"] == 0.5
    assert sum(name.startswith("reward/own/") for name in metrics) == MOST_DETAILS - 1


def test_the_sampler_is_asked_for_what_the_recipe_says() -> None:
    keys = {
        "samples_per_prompt": 3,
        "max_response_tokens": 9,
        "temperature": 0.7,
        "top_k": 5,
        "top_p": 0.8,
    }
    asked = sampling_params(RolloutSection(**keys), (1, 2))
    assert (
        asked.samples,
        asked.max_tokens,
        asked.temperature,
        asked.top_k,
        asked.top_p,
    ) == tuple(keys.values())
    assert asked.stop_token_ids == (1, 2)
    assert asked.candidates == RolloutSection(**keys).candidates > 5
    assert (asked.top_logprobs, asked.top_mass) == (0, 0.999)
    assert sampling_params(RolloutSection(), ()).top_k == -1  # among all
    top = RolloutSection(top_logprobs=TopLogprobsSection(32, 0.9))
    asked = sampling_params(top, ())
    assert (asked.top_logprobs, asked.top_mass, asked.candidates) == (32, 0.9, 0)


def test_a_session_is_scored_by_its_last_response_however_this_branch_ended() -> None:
    turns = [SessionTurn(finish_reason="length", tokens=3), SessionTurn(tokens=2)]
    for end, expected in (("done", "stop"), ("length", "length")):
        session = Session(turns, rows=2, end=end, answer="42")
        cut = rollout((5,), finish_reason="length", session=session)
        task = _task(cut, "4")
        assert (task.response, task.finish_reason) == ("42", expected)
        assert _sampled(Scored(cut, 0.0)) == 5, "of both branches"


def test_a_data_set_s_own_answer_says_where_it_is_cut() -> None:
    params = sampling_params(RolloutSection(max_response_tokens=3), (1,))
    asked = DatasetResponses(SimpleNamespace(encode=lambda text: [*map(ord, text)])).stream(
        params, seed=0, step=4
    )
    asked.add([Prompt(0, (1,), "", {"answer": text}) for text in ("ab", "abc")], 0)
    (whole,), (cut,) = asked.finished()
    assert (
        *whole.token_ids,
        whole.finish_reason,
        whole.policy_version,
    ) == (97, 98, 1, "stop", 3)
    assert (*cut.token_ids, cut.finish_reason) == (97, 98, 99, "length")


def test_metrics_of_top_logprobs_are_of_sampled_tokens_that_have_any() -> None:
    section = TopLogprobsSection(max=2, mass=0.9)
    shares = [0.5, 0.3, 0.95, 0.6, 0.4, 1.0]
    logprobs = np.append(np.log(shares[:5]), math.nan).astype(np.float16)
    one = rollout(
        (1, 2, 3, 4, 5),
        top_counts=[2, 0, 1, 2, 1],  # a tool's token is the second, the last one is unknown
        top_ids=range(6),
        top_logprobs=logprobs,
    )
    found = top_metrics([one, rollout((1,)), rollout(())], section)
    assert found == {
        "rollout/top_tokens_mean": pytest.approx(5 / 3),
        "rollout/top_mass_mean": pytest.approx((0.8 + 0.95 + 1.0) / 3, rel=1e-3),
        "rollout/top_tokens_limited_fraction": pytest.approx(1 / 3),
    }
    assert top_metrics([one], TopLogprobsSection()) == {}
    assert top_metrics([], section)["rollout/top_mass_mean"] == 0
