"""The plan's time of an update, by launches, bytes and products, against the one measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_rl.apps.planner import passes
from megatron_rl.apps.planner.case import Assumptions, Case
from megatron_rl.apps.planner.time import step_time
from megatron_rl.config import load
from megatron_rl.preflight.files import read_card
from megatron_rl.preflight.machine import named

RECIPES = Path(__file__).parents[3] / "recipes"
# docs/experiments/gpu-results.md: Qwen3-0.6B on one H100, every layer recomputed
MEASURED_S = 4.8
MEASURED_FLOPS = 102e12
# the output layer of then: 44 chunks of columns in 13 pieces, each of 43 operators and views
PIECES = {"LOGIT_FORWARD": 46, "LOGIT_BACKWARD": 40, "LOGIT_KERNELS": 13 * 43}
# maxima of 56 norms, 0.7 GB moved for each, of nine packs, and again in the recomputed pass
MAXIMA_S = 2 * 9 * 56 * 0.7e9 / (3.35e12 * 0.75)


def case(recipe: str, *words: str, **assumed: float) -> Case:
    config = load(RECIPES / f"{recipe}.yaml", words)
    card = read_card(config.model.folder)
    return Case(config, card, named("2x8xH100-80"), Assumptions(**assumed))


def measured(tokens: int = 16384, **assumed: float) -> Case:
    """256 answers of 512 tokens, in packs of so many tokens."""
    words = (
        "rollout.max_prompt_tokens=16",
        "rollout.max_response_tokens=512",
        "rollout.prompts_per_step=16",
        f"learner.tokens_per_microbatch={tokens}",
    )
    return case("grpo-qwen3_0.6b-1n1g-int8", *words, response=1.0, prompt=0.75, **assumed)


def test_the_update_that_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in PIECES.items():
        monkeypatch.setattr(passes, name, value)
    one = measured()
    assert passes.needed(one) / MEASURED_S == pytest.approx(MEASURED_FLOPS, rel=0.03)
    planned = passes.seconds(one, 3, again=1.0) + MAXIMA_S
    assert 0.8 * MEASURED_S < planned < MEASURED_S
    # the output layer waits for its launches
    assert passes._head(one, 3) == pytest.approx(46 * 13 * 43 * 10e-6)


def test_fused_kernels_without_recomputing_take_less_than_half() -> None:
    update = passes.seconds(measured(), 3)
    assert update < MEASURED_S / 2
    assert passes.seconds(measured(), 1) < 0.35 * update


def test_small_packs_wait_for_their_launches() -> None:
    def slower(tokens: int) -> float:
        one, twice = (measured(tokens, launch_us=us) for us in (10, 20))
        return passes._body(twice, 3, 0.0) / passes._body(one, 3, 0.0)

    assert slower(16384) == 1.0
    assert slower(1024) == pytest.approx(2.0)


def test_the_share_of_the_peak_grows_with_width_and_pack() -> None:
    def share(model: str, tokens: int) -> float:
        words = (
            f"model.path=models/{model}",
            f"learner.tokens_per_microbatch={tokens}",
            "learner.recompute=none",
        )
        return step_time(case("grpo-qwen3_0.6b-1n1g-int8", *words)).mfu

    widths = [share(model, 8192) for model in ("Qwen3-0.6B", "Qwen3-1.7B", "Qwen3-8B")]
    packs = [share("Qwen3-8B", tokens) for tokens in (2048, 8192, 32768)]
    assert widths == sorted(widths)
    assert packs == sorted(packs)


def test_a_model_of_eight_billion_gets_a_usual_share() -> None:
    assert 0.35 < step_time(case("dapo_int8")).mfu < 0.45
