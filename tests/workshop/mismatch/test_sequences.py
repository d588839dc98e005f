"""Which tokens `megatron-rl mismatch` passes through both engines."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from run_factory import make_scored

from megatron_rl.config import ConfigError
from megatron_rl.config.schema import Config
from megatron_rl.data.toy import write_toy
from megatron_rl.runs.rollout_file import write_rollouts
from megatron_rl.workshop.mismatch.mismatch import Wanted, prompts, recorded


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (1, 2):
        scored, _ = make_scored(40, length=30, seed=step)
        empty = replace(
            scored[0], rollout=replace(scored[0].rollout, token_ids=(), logprobs=(), loss_mask=())
        )
        (tmp_path / "rollouts").mkdir(exist_ok=True)
        write_rollouts(tmp_path / "rollouts" / f"step_{step}.parquet", [empty, *scored])
    return tmp_path


def test_the_last_recorded_rollouts_spread_over_the_step(run: Path) -> None:
    found = recorded(Wanted(4, 128, run=run), 128)
    scored, _ = make_scored(40, length=30, seed=2)
    assert [list(one.token_ids) for one in found] == [
        list(one.rollout.token_ids) for one in scored[::10]
    ]
    every = recorded(Wanted(99, 128, run=run), 128)
    assert len(every) == 40 and all(one.token_ids for one in every)


@pytest.mark.parametrize("room", [4, 7, 31])
def test_prompt_and_answer_fit_the_room(run: Path, room: int) -> None:
    cut, uncut = (recorded(Wanted(40, most, run=run), most) for most in (room, 128))
    for one, whole in zip(cut, uncut, strict=True):
        tokens = len(one.prompt.token_ids)
        answer = len(one.token_ids)
        assert tokens >= 1 and 1 <= answer == len(one.logprobs) == len(one.loss_mask)
        assert tokens + answer == min(room, len(whole.prompt.token_ids) + len(whole.token_ids))
        assert whole.token_ids[:answer] == one.token_ids
        assert whole.prompt.token_ids[-tokens:] == one.prompt.token_ids


def test_experts_are_cut_as_their_tokens_are(tmp_path: Path) -> None:
    scored, _ = make_scored(6, length=9)
    rows = []
    for one in scored:
        tokens = [*one.rollout.prompt.token_ids, *one.rollout.token_ids]
        # each token's own number
        experts_SLK = np.array(tokens[:-1], np.uint8)[:, None, None].repeat(2, 1)
        rows.append(replace(one, rollout=replace(one.rollout, experts_SLK=experts_SLK)))
    (tmp_path / "rollouts").mkdir()
    write_rollouts(tmp_path / "rollouts" / "step_1.parquet", rows, experts=True)
    for room in (4, 7, 64):
        for one in recorded(Wanted(6, room, run=tmp_path), room):
            assert one.experts_SLK is not None
            kept = [*one.prompt.token_ids, *one.token_ids][:-1]
            assert one.experts_SLK[:, 0, 0].tolist() == [token % 256 for token in kept]


def test_without_a_run_or_with_a_file_there_are_prompts(run: Path, tmp_path: Path) -> None:
    write_toy(tmp_path / "toy")
    file = Wanted(3, 16, tmp_path / "toy" / "test.jsonl", run)
    assert recorded(file, 16) == recorded(Wanted(3, 16), 16) == []
    folder = tmp_path / "toy" / "model"
    assert [len(one.token_ids) <= 8 for one in prompts(Config(), folder, 50, file, 16)] == [
        True
    ] * 3
    random, again = (prompts(Config(), folder, 50, Wanted(3, 16), 16) for _ in range(2))
    assert [len(one.token_ids) for one in random] == [8] * 3
    assert max(token for one in random for token in one.token_ids) < 50
    assert random == again
    with pytest.raises(ConfigError, match="no file"):
        prompts(Config(), folder, 50, replace(file, prompts=tmp_path / "none.jsonl"), 16)
