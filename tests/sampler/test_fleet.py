"""Two live engines, updated, misled and killed, and a server that strangers look at.

Engine 0 samples in INT8, engine 1 and the server in BF16.
"""

import math
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

import numpy as np
import psutil
import pytest
from helpers import logged, wait_for
from live_fleet import (
    FORMATS,
    KEY,
    LOG,
    LONG,
    MANY,
    SAMPLING,
    LiveFleet,
    flip_a_byte,
    served,
)
from tiny_engine import PROMPTS, make_model, make_settings, startable

from megatron_rl.config.schema import Format
from megatron_rl.sampler.sampler import Sampler
from megatron_rl.types import Rollout
from megatron_rl.weight_sync import file_transport as transport
from megatron_rl.weight_sync.manifest import WeightSyncError

pytestmark = pytest.mark.engine
CLOSE = 0.02  # nats: what two BF16 engines with the same weights are apart at most


@pytest.fixture(scope="module")
def live(tmp_path_factory) -> Iterator[LiveFleet]:
    folder = tmp_path_factory.mktemp("fleet")
    model = make_model(folder / "hf", True)
    settings = make_settings(engines=2, formats=FORMATS)
    with startable(), Sampler(settings, model.folder, folder) as sampler:
        fleet = LiveFleet(sampler, model, folder)
        fleet.update(1)
        yield fleet


@pytest.fixture(scope="module")
def far(live, tmp_path_factory) -> Iterator[Sampler]:
    """Server given by address, with the weights of seed 5."""
    folder = tmp_path_factory.mktemp("far")
    with served(live.model, folder) as address:
        settings = make_settings(addresses=[address])
        with Sampler(settings, live.model.folder, folder) as sampler:
            tensors = live.model.quantized(5, Format.none).items()
            transport.write_version(folder, 0, tensors, format="none")
            sampler.init_weight_transfer_engine({})
            sampler.start_weight_update()
            sampler.update_weights(transport.update_info(folder, 0, 1))
            sampler.finish_weight_update("0")
            yield sampler


def essence(rollouts: list[Rollout]) -> list[tuple]:
    return [
        (
            r.group,
            r.sample,
            r.token_ids,
            r.finish_reason,
            r.format,
        )
        for r in rollouts
    ]


def sets(rollout: Rollout) -> list[set[int]]:
    """Candidates of each token."""
    ids = iter(rollout.kept_ids or ())
    return [set(islice(ids, count)) for count in rollout.kept_counts or ()]


def test_both_formats_answer_in_order_and_show_every_update(live):
    first = live.rollouts()
    assert [(r.group, r.sample) for r in first] == [
        (g, s) for g in range(len(PROMPTS)) for s in range(2)
    ]
    assert {r.format for r in first} == {"none", "int8"}
    assert {r.policy_version for r in first} == {live.sampler.policy_version}
    assert all(len(r.token_ids) == len(r.logprobs) == 8 and max(r.logprobs) <= 0 for r in first)
    live.update(2)
    second = live.rollouts()
    assert {r.policy_version for r in second} == {first[0].policy_version + 1}
    for format in ("none", "int8"):
        before = {r.group: r.token_ids for r in first if r.format == format and r.sample == 0}
        after = {r.group: r.token_ids for r in second if r.format == format and r.sample == 0}
        assert any(before[group] != after[group] for group in before.keys() & after.keys()), format
    assert not any(math.isnan(logprob) for r in first + second for logprob in r.logprobs)


def test_the_key_is_in_no_command_line_and_no_log(far):
    log = far._log_dir / LOG
    assert KEY not in log.read_text(errors="replace")
    children = psutil.Process().children(recursive=True)
    assert not any(KEY in " ".join(one.cmdline()) for one in children)


def test_groups_come_as_they_finish(live):
    held, other = live.replicas
    stream = live.sampler.stream(SAMPLING, seed=1)
    assert stream.finished() == []
    with live.paused(held):
        stream.add(MANY[:20], 0)
        parts = [stream.finished()]
        assert held.load, "its requests are open, and no caller waits for them"
        assert {r.format for group in parts[0] for r in group} == {other.format}
    stream.add(MANY[20:40], 20)
    while parts[-1]:
        parts.append(stream.finished())
    stream.close()
    groups = sorted((group for part in parts for group in part), key=lambda group: group[0].group)
    assert [[(r.group, r.sample) for r in group] for group in groups] == [
        [(g, 0), (g, 1)] for g in range(40)
    ]


def test_closing_ends_what_the_servers_work_on(live):
    stream = live.sampler.stream(LONG, seed=2)
    with live.paused(live.replicas[0]), live.paused(live.replicas[1]):
        stream.add(MANY, 0)
        wait_for(lambda: all(one.running and one.load for one in live.replicas))
        stream.close()
    wait_for(lambda: live.open() == [0, 0])
    assert stream.finished() == []
    assert not any(one.running or one.load for one in live.replicas)


def test_an_update_in_mid_answer_shows_in_the_versions_of_its_tokens(live):
    # on a busy machine an engine may have ended its answers before the update comes
    for _ in range(8):
        live.update(3)
        old = live.sampler.policy_version
        with live.collecting() as rollouts:
            live.update(4)
        assert all(len(r.token_ids) == 24 for r in rollouts)
        spanning = [r for r in rollouts if r.versions is not None]
        if {r.format for r in spanning} == {"none", "int8"}:
            break
    assert {r.policy_version for r in rollouts} == {old, old + 1}
    assert {r.format for r in spanning} == {"none", "int8"}
    for r in spanning:
        assert len(r.versions) == 24
        assert set(r.versions) == {old, old + 1}
        assert list(r.versions) == sorted(r.versions)
        assert r.policy_version == old
    found = {"new": [], "old": [], "swapped": []}
    for r in [r for r in spanning if r.format == "none"]:
        of_old = live.reference(3, r)
        of_new = live.reference(4, r)
        versions = np.array(r.versions)
        found["old"] += np.abs(of_old - r.logprobs)[versions == old].tolist()
        found["new"] += np.abs(of_new - r.logprobs)[versions > old].tolist()
        found["swapped"] += np.abs(of_old - r.logprobs)[versions > old].tolist()
    means = {name: float(np.mean(values)) for name, values in found.items()}
    assert means["old"] < CLOSE
    assert means["swapped"] > 10 * CLOSE
    assert means["new"] < CLOSE, means
    assert live.sampler.last_sync["pause_s"] > 0


@pytest.mark.fault(
    "an update refused in the middle of answers", "the answers go on with the version before"
)
def test_an_update_that_one_engine_refuses_reaches_none_and_harms_no_answer(live):
    version = live.sampler.policy_version
    retried = live.sampler.stats.retried
    with (
        live.collecting() as rollouts,
        pytest.raises(WeightSyncError, match=r"engine 0 .*corrupt"),
    ):
        live.update(7, flip_a_byte)
    assert live.sampler.policy_version == version
    assert [one["policy_version"] for one in live.sampler.health()["engines"]] == [version] * 2
    assert {r.policy_version for r in [*rollouts, *live.rollouts()]} == {version}
    assert all(r.versions is None and r.finish_reason == "length" for r in rollouts)
    assert live.sampler.stats.retried == retried
    live.update(7)
    assert live.sampler.policy_version == version + 1


@pytest.mark.fault(
    "one of several engines is killed in mid-answer, with an update in flight",
    "it comes back; every prompt is answered",
)
def test_an_engine_killed_in_mid_answer_with_an_update_in_flight_loses_no_prompt(live):
    live.update(8)
    notes = logged()
    old = live.sampler.policy_version
    victim = live.replicas[0]
    pid = victim.process.pid

    def kill() -> None:
        assert victim.running
        os.kill(pid, signal.SIGKILL)

    with live.collecting() as rollouts:
        live.update(9, before_finish=kill)
    assert all(len(r.token_ids) == 24 and r.prompt in MANY for r in rollouts)
    assert {version for r in rollouts for version in r.versions or [r.policy_version]} == {
        old,
        old + 1,
    }
    assert live.sampler.policy_version == old + 1
    assert live.sampler.stats.retried > 0
    assert any("(int8) is unavailable" in line for line in notes)

    wait_for(lambda: all(replica.ready for replica in live.replicas))
    again = live.rollouts()
    assert victim.process.pid != pid
    assert {r.format for r in again} == {"none", "int8"}
    assert {r.policy_version for r in again} == {live.sampler.policy_version}
    assert live.sampler.stats.restarts == 1
    live.update(10)
    assert {r.policy_version for r in live.rollouts()} == {live.sampler.policy_version}


def test_a_server_answers_like_an_engine_of_the_run(live, far):
    live.update(5)
    held = live.replicas[0]
    held.begin_update()  # is given no prompt
    try:
        answers = []
        for sampler in (far, live.sampler):
            several = sampler.generate(PROMPTS, SAMPLING, seed=3, first_group=4)
            filtered = replace(
                SAMPLING, top_k=5, top_p=0.9, candidates=16, top_logprobs=4, top_mass=0.95
            )
            kept = sampler.generate(PROMPTS, filtered, seed=3, first_group=4)
            answers.append(several + kept)
    finally:
        held.end_update()
    assert essence(answers[0]) == essence(answers[1])
    for one, other in zip(*answers, strict=True):
        assert all(
            math.isclose(a, b, abs_tol=0.02)
            for a, b in zip(one.logprobs, other.logprobs, strict=True)
        )
        assert (one.kept_counts, *sets(one)) == (other.kept_counts, *sets(other))
    kept = answers[0][2 * len(PROMPTS) :]
    counts = sorted(count for one in kept for count in one.kept_counts)
    assert counts[0] >= 1
    assert counts[len(counts) * 3 // 4] <= 5, "more only where BF16 logits tie with the fifth"
    assert answers[0][0].kept_ids is answers[0][0].top_ids is None
    for one in kept + answers[1][2 * len(PROMPTS) :]:
        assert max(one.top_counts) <= 4
        assert set(one.top_ids) <= set(one.kept_ids)
        assert len(one.top_logprobs) == sum(one.top_counts)
