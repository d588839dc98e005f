"""A live engine that is updated in place: equal to a fresh one, all or nothing, and wrong when
it must be.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path

import pytest
import torch
from live_fleet import flip_a_byte
from tiny_engine import Live, essence, fresh_rollouts, start_live, startable
from versions import write_chain

from megatron_rl.config.schema import Format
from megatron_rl.sampler.client.interface import SamplerError
from megatron_rl.types import Rollout, SamplingParams
from megatron_rl.weight_sync.delta import Sent
from megatron_rl.weight_sync.manifest import WeightSyncError

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Format], Live]]:
    """Engine of each format, started at its first use."""
    with ExitStack() as engines:

        @cache
        def live(format: Format) -> Live:
            folder = tmp_path_factory.mktemp("live")
            tied = format != Format.fp8
            return engines.enter_context(contextmanager(start_live)(folder, format, tied))

        yield live


def mean_difference(live: Live, right: list[Rollout], wrong: list[Rollout]) -> float:
    """Mean |logprob difference| on the tokens that both sampled from equal prefixes; infinite if
    there is none.
    """
    differences = []
    for a, b in zip(right, wrong, strict=True):
        for i, (mine, other) in enumerate(zip(a.logprobs, b.logprobs, strict=True)):
            if a.token_ids[: i + 1] == b.token_ids[: i + 1]:
                differences.append(abs(mine - other) if math.isfinite(other) else math.inf)
    return sum(differences) / len(differences) if differences else math.inf


def resident_mib(pid: int) -> float:
    """Memory of a process that no other shares: what it has mapped of the files it reads
    does not count.
    """
    status = Path(f"/proc/{pid}/status").read_text()
    return (
        int(next(line.split()[1] for line in status.splitlines() if line.startswith("RssAnon")))
        / 1024
    )


@pytest.mark.parametrize("format", [Format.none, Format.int8, Format.fp8])
def test_fifty_updates_equal_a_fresh_engine(format, engine, tmp_path):
    live = engine(format)
    pid = live.sampler.health()["pid"]
    answers = {}
    memory = {}
    for update in range(50):
        seed = 11 + update
        live.update(seed)
        if update in (0, 24, 48, 49):
            answers[seed] = live.answers()
        if update in (19, 49):
            memory[update] = resident_mib(pid)
    assert len({str(answer) for answer in answers.values()}) == 4, "every update must show"
    assert answers[60] == essence(fresh_rollouts(live, 60, tmp_path))
    live.update(11)
    assert live.answers() == answers[11], "a change and a change back"
    assert live.rollouts()[0].policy_version == live.sampler.policy_version == 50
    assert not any(
        math.isnan(lp)
        for answer in answers.values()
        for *_, logprobs, _ in answer
        for lp in logprobs
    )
    assert memory[49] - memory[19] < 6, "thirty updates of half a megabyte or more would show"


@pytest.mark.fault(
    "a version is damaged before it is checked, or after that",
    "refused, the version before serves on",
)
@pytest.mark.parametrize(
    ("format", "fault", "message"),
    [
        (Format.int8, flip_a_byte, "corrupt tensor"),
        (Format.int8, "changed_after_the_check", "corrupt tensor"),
        (Format.int8, "cut_after_the_check", "truncated file"),
        (Format.none, "parameter_not_written", r"unwritten: model\.norm\.weight"),
    ],
    ids=lambda value: getattr(value, "__name__", value if isinstance(value, str) else ""),
)
def test_a_faulty_update_is_refused_and_the_old_version_serves_on(format, fault, message, engine):
    live = engine(format)
    live.update(21)
    version = live.sampler.policy_version
    before = live.answers()
    with pytest.raises(WeightSyncError, match=message):
        live.update(22, fault)
    assert live.sampler.health()["policy_version"] == live.sampler.policy_version == version
    assert live.answers() == before
    live.update(22)
    assert live.answers() != before


def test_patches_load_like_whole_tensors(engine):
    """A version of patches, read by a receiver that has not read the one before."""
    live = engine(Format.fp8)
    live.update(71)
    right = live.answers()
    first = live.next_version
    versions = [live.model.quantized(seed, live.format) for seed in (72, 71)]
    write_chain(live.directory, versions, first=first, sent=Sent())
    live.load(first + 1)
    assert live.answers() == right


@pytest.mark.parametrize(
    ("format", "fault"),
    [(Format.int8, "kernels_not_rebuilt"), (Format.none, "tied_head_not_refreshed")],
)
def test_what_the_probe_must_catch_is_visible(format, fault, engine):
    if format == Format.none and not torch.cpu._is_avx512_supported():
        pytest.skip(
            "without AVX-512 the head's weights are not packed, so that nothing is left to refresh"
        )
    live = engine(format)
    live.update(31)
    live.update(32)
    right = live.rollouts()
    live.update(31)
    live.update(32, fault)
    wrong = live.rollouts()
    assert mean_difference(live, right, wrong) > 0.3
    live.update(32)
    assert live.answers() == essence(right), "the next good update repairs it"


def test_after_an_update_that_stops_half_way_another_engine_serves_the_version_before(engine):
    live = engine(Format.none)
    live.update(41)
    before = live.answers()
    with startable():
        with pytest.raises(SamplerError, match="stopped half-way"):
            live.update(42, "stopped_half_way")
        assert live.answers() == before
    assert live.sampler.stats.restarts == 1
    live.update(42)
    assert live.answers() != before


def test_greedy_samples_are_equal_and_a_stop_token_ends_one(engine):
    live = engine(Format.none)
    live.update(51)
    first, *_ = live.rollouts()
    greedy = live.rollouts(params=SamplingParams(samples=2, max_tokens=6, temperature=0.0))
    assert [r.token_ids for r in greedy[::2]] == [r.token_ids for r in greedy[1::2]]
    stop = first.token_ids[2]
    stopped, *_ = live.rollouts(
        params=SamplingParams(samples=2, max_tokens=6, stop_token_ids=(stop,))
    )
    assert (first.finish_reason, stopped.finish_reason) == ("length", "stop")
    assert stopped.token_ids[-1] == stop
