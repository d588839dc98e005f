"""The loop's frame: what is closed, in which order, when a step fails, and what its updates are
handed.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from rollouts import rollout

from megatron_rl import driver, train
from megatron_rl.batch import Share, collate
from megatron_rl.config import load, to_yaml

from megatron_rl.config.schema import (  # isort: skip
    AdvantageConfig,
    CheckpointSection,
    Config,
    CorrectionConfig,
    EvalSection,
    LossConfig,
    RejectRule,
    SyncSection,
)
from megatron_rl.driver import Driver
from megatron_rl.learner.modules import router_replay
from megatron_rl.learner.shares import minibatches
from megatron_rl.rank0 import Rank0
from megatron_rl.rollout.collect import Collected
from megatron_rl.sampler.sampler import SamplerStats
from megatron_rl.step import CorrectedBatch
from megatron_rl.supervision.stop_request import StepAborted
from megatron_rl.tracking.progress import Progress, SaveSchedule
from megatron_rl.tracking.status import read_status
from megatron_rl.types import NO_EXPERT, Rollout, Scored
from megatron_rl.weight_sync.manifest import UpdateRefused

ROOT = Path(__file__).parent.parent
QUICKSTART = ROOT / "recipes" / "quickstart.yaml"


def recorder(**more: Any) -> Any:
    """A record that keeps nothing."""
    return SimpleNamespace(
        phase=lambda _: nullcontext(), note=lambda _: None, ledger=lambda *_: None, **more
    )


def learner(**more: Any) -> Any:
    """A learner of one rank."""
    return SimpleNamespace(broadcast=lambda value: value, release_memory=lambda: None, **more)


def joined(driver: Any) -> Rank0:
    rank0 = Rank0(driver)
    rank0.connect(learner())
    return rank0


def answer(
    sample: int, logprobs: Sequence[float] = (-0.5,) * 3, versions: list[int] | None = None
) -> Rollout:
    version = versions[0] if versions else 0
    ones = [1] * len(logprobs)
    return rollout(
        ones, sample=sample, logprobs=logprobs, policy_version=version, versions=versions
    )


class TrainPart:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name = name
        self.log = log
        self.sampler = None
        self.smoothing = None
        self.recorder: Any = SimpleNamespace(note=log.append)

    def set_smoothing(self, smoothing: None) -> None:
        pass

    def close(self) -> None:
        self.log.append(f"{self.name} closed")

    def __enter__(self) -> "TrainPart":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.log.append(f"{self.name} ended: {kind.__name__ if kind else None}")


def test_the_driver_says_how_it_ended_before_the_ranks_part(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    log: list[str] = []

    def fails(*_: Any) -> None:
        raise ArithmeticError

    for name, part in (
        ("Driver", "driver"),
        ("Learner", "learner"),
        ("WeightSync", "sync"),
    ):
        monkeypatch.setattr(
            train,
            name,
            lambda *_, part=part, **__: TrainPart(part, log),
        )
    for name in ("Model", "LearnerState", "Saver"):
        monkeypatch.setattr(train, name, mock.MagicMock())
    monkeypatch.setattr(train, "load_or_resume", lambda *_: (0, None))
    monkeypatch.setattr(train, "loop", fails)
    with pytest.raises(ArithmeticError):
        train.train(Config(), "", tmp_path, rank=0)
    assert log == ["sync closed", "driver ended: ArithmeticError", "learner closed"]


@pytest.mark.parametrize(("after", "saved", "keeps"), [(0, None, []), (1, None, [1]), (2, 2, [])])
def test_what_stands_is_kept_of_a_step_that_is_given_up(
    monkeypatch: pytest.MonkeyPatch, after: int, saved: int | None, keeps: list[int]
) -> None:
    kept: list[int] = []

    def aborted(*_: Any) -> None:
        raise StepAborted("asked")

    monkeypatch.setattr(train, "sync_and_log", lambda at, *_, **__: (at, None))
    monkeypatch.setattr(train, "train_step", aborted)
    monkeypatch.setattr(train, "save_if_due", lambda at, *_: kept.append(at.step))
    driver: Any = SimpleNamespace(recorder=recorder(), end_early=lambda *_: None)
    traced = learner(profiler=SimpleNamespace(step=lambda _: nullcontext()))
    saver: Any = SimpleNamespace(close=lambda: None, newest=saved, kept="")
    train.loop(
        Config(),
        joined(driver),
        traced,
        None,
        saver,
        Progress(after),
    )
    assert kept == keeps


def test_a_checkpoint_has_the_place_of_its_step_and_not_of_the_one_that_is_given_up() -> None:
    driver = Driver.__new__(Driver)
    driver._stop = Any
    driver._saves = SaveSchedule(CheckpointSection(every=1), None)
    driver._data = "rows"
    driver.position = 24  # behind the batch of step 2, which nothing was made of
    about = driver.to_keep(
        Progress(1, position=16),
        {},
        None,
        ending=True,
    )
    assert about is not None and about["driver"]["position"] == 16


def test_a_driver_that_cannot_begin_closes_its_record(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example because of an incomplete checkpoint."""
    config = load("mine.yaml")
    monkeypatch.setattr(driver, "SaveSchedule", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        Driver(config, to_yaml(config), place / "run")
    assert read_status(place / "run")["state"] == "failed"


def test_a_refused_version_is_left_out_where_there_is_a_batch_for_the_next_step() -> None:
    def push(step: int) -> None:
        raise UpdateRefused("corrupt tensor")

    driver: Any = SimpleNamespace(
        recorder=recorder(), syncing=nullcontext, can_skip_sync=lambda step: step == 4
    )
    given: Any = joined(driver), learner(), SimpleNamespace(push=push)
    assert train.sync_weights(3, 7, SyncSection(), *given) == {"sync/refused": 1.0}
    with pytest.raises(UpdateRefused):
        train.sync_weights(4, 7, SyncSection(), *given)
    # then all batches up to the next sync have to be there
    seldom = SyncSection(every=3)
    assert train.sync_weights(3, 4, seldom, *given) == {"sync/refused": 1.0}
    with pytest.raises(UpdateRefused):
        train.sync_weights(3, 7, seldom, *given)


def test_when_to_evaluate_and_to_publish() -> None:
    log: list[str] = []
    driver: Any = SimpleNamespace(
        recorder=recorder(),
        evaluate=lambda: {"at": 0},
        syncing=lambda: TrainPart("awake", log),
        sampler=SimpleNamespace(last_sync={"pause_s": 0.1, "nbytes": 1}),
    )
    rank = learner()
    rank.release_memory = lambda: log.append("room made")
    rank0 = joined(driver)

    def push(step: int) -> Any:
        log.append(f"push {step}")
        return SimpleNamespace(metrics=lambda: {"at": step}, first_failure=None)

    sync: Any = SimpleNamespace(push=push)

    def evaluated(every: int) -> list[int]:
        return [
            step
            for step in range(8)
            if train.evaluate(
                step,
                7,
                EvalSection(every=every),
                rank0,
            )
        ]

    assert evaluated(3) == [0, 3, 6, 7]
    assert evaluated(0) == []
    section = SyncSection(every=3, probe_every=0)
    assert [
        step
        for step in range(1, 8)
        if train.sync_weights(
            step,
            7,
            section,
            rank0,
            rank,
            sync,
        )
    ] == [3, 6, 7]
    # also where the engine wakes without a sync
    assert log[:6] == [*["room made"] * 3, "push 3", "awake ended: None", "room made"]


def test_experts_are_gathered_and_those_of_a_silent_engine_are_marked() -> None:
    read = 3  # a prompt of one token and all but the last of the answer
    given = replace(answer(0), experts_SLK=np.full((read, 3, 2), 255, np.uint8))
    batch = collate([Scored(given, 1.0), Scored(answer(1), 0.0)])
    assert batch.experts_PLK.shape == (len(batch.tokens_P), 3, 2)
    assert (batch.experts_PLK[:read] == 255).all(), "an expert's number, not a mark"
    assert (batch.experts_PLK[read:] == NO_EXPERT).all()


@pytest.mark.parametrize(("replayed", "flips"), [(0.0, 0.0), (1.0, 0.6)])
def test_a_replay_that_is_none_ends_the_run(replayed: float, flips: float) -> None:
    found = {"router/replayed": replayed, "router/flips": flips}
    with pytest.raises(router_replay.ReplayError, match=r"^learner\.router: replay"):
        router_replay.check(found)
    assert router_replay.check({"router/replayed": 0.9, "router/flips": 0.1})
    assert router_replay.check({}) == {}


@pytest.mark.parametrize("preset", ["tis", "bypass"])
def test_a_step_without_a_proximal_pass_records_none(preset: str) -> None:
    """Not the sampler's own logprobs, which would show as perfect agreement in replay and
    report.
    """
    written: dict[str, Any] = {}
    record = recorder(rollouts=lambda step, scored, **columns: written.update(columns))
    config = load(QUICKSTART, [f"correction={preset}"])
    scored = [Scored(answer(at), float(at)) for at in range(2)]
    work = CorrectedBatch.corrected(
        config,
        Share.alone(collate(scored)),
        9,
        torch.full((6,), -0.1),
    )
    scorer = SimpleNamespace(whole=list, pieces=lambda one: [])
    driver: Any = SimpleNamespace(
        _scored=scored,
        _scorer=scorer,
        _ordinals=(0, 1),
        recorder=record,
    )
    Driver.record(driver, 10, work.recorded(), work.advantages_B)
    assert (written["prox_logprobs_N"] is None) == (preset == "bypass")


def test_a_step_trains_on_no_token_that_a_rule_finds_too_old() -> None:
    """The learner's version is that of the step before."""
    rule = "correction.reject=[{level: token, stat: staleness, high: 1}]"
    config = load(QUICKSTART, [rule])
    old = answer(0, versions=[4, 5, 6])
    new = answer(1, versions=[6, 6, 6])
    scored = [Scored(old, 0.0), Scored(new, 1.0)]
    trained: list[Any] = []
    driver: Any = Driver.__new__(Driver)
    driver._config = config
    driver._stop = driver._sleep_schedule = mock.MagicMock()
    driver._batches = SimpleNamespace(take=lambda _: Collected(scored, scored, {}, (0, 1)))
    driver._seen = SamplerStats()
    driver.sampler = SimpleNamespace(stats=SamplerStats())
    driver.recorder = recorder(spans=lambda _: None)
    rank = learner(
        split=lambda batch, *_: Share.alone(batch),
        logprobs=lambda share: share.batch.sampler_logprobs_N,
        update=lambda share, targets, rows: trained.append(targets.rows(rows)) or {},
        take_replayed=dict,
        take_own_logprobs=lambda: None,
    )
    at = train.train_step(train.Progress(step=6), config, joined(driver), rank)
    (targets,) = trained
    young = [False, True, True, True, True, True]
    assert targets.mask_N.tolist() == targets.denominator_mask_N.tolist() == young
    assert at.line is not None
    assert at.line["rollout_corr/stale_masked_fraction"] == pytest.approx(1 / 6)


def test_covariance_tokens_are_selected_among_those_that_are_trained_on() -> None:
    """The last row is rejected, and has the highest covariance by far."""
    anchor_N = torch.tensor([-1.0, -2.0, -3.0, -90.0])
    sampled = (-1.0, -2.0, -3.0, -95.0)
    rewards = (2.0, -1.0, -1.0, -50.0)
    batch = collate([Scored(answer(at, [mu]), rewards[at]) for at, mu in enumerate(sampled)])
    rule = RejectRule(stat="ratio", reduce="max", high=2.0)
    config = Config(
        loss=LossConfig(name="kl_cov"),
        advantage=AdvantageConfig("dr_grpo"),
        correction=CorrectionConfig(reject=[rule], rebaseline=False),
    )
    targets = CorrectedBatch.corrected(config, Share.alone(batch), 1, anchor_N).targets(None)
    assert targets.advantages_B.tolist() == [14.5, 11.5, 11.5, -37.5]
    assert targets.mask_N.tolist() == [True, True, True, False]
    (rows,) = minibatches(batch.groups_B, 4, "1/1")
    assert rows.tolist() == [0, 1, 2, 3]
    assert targets.selected_N is not None
    assert targets.selected_N.tolist() == [True, False, False, False]
