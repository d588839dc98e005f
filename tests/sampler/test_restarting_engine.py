"""An embedded engine that dies comes back with its weights, and the call that it died in gives
the same answers.
"""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import logged
from tiny_engine import PROMPTS, Live, essence, rest, start_live

from megatron_rl.config.schema import Format
from megatron_rl.sampler.client.interface import SamplerError
from megatron_rl.sampler.supervisor import MAX_RESTARTS
from megatron_rl.types import SamplingParams
from megatron_rl.weight_sync import file_transport as transport

LONG = SamplingParams(samples=8, max_tokens=24)


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Live]:
    yield from start_live(tmp_path, Format.int8, tied=True, seed=1)


@pytest.mark.engine
@pytest.mark.fault(
    "the embedded engine is killed: idle, in mid-generation, in mid-update; and once more",
    "it is started again with its weights and gives the same answers; after three times the run "
    "ends by a sentence",
)
def test_it_comes_back_with_its_weights(
    live: Live, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = logged()
    first = live.answers(params=LONG)
    live.kill()
    assert live.answers(params=LONG) == first
    assert (live.sampler.stats.restarts, len(notes)) == (1, 3)
    assert "SIGKILL" in notes[1]
    assert "1 of 3 restarts" in notes[1]

    # it answers nothing before it is killed
    os.kill(live.sampler.replicas[0].process.pid, signal.SIGSTOP)
    stream = live.sampler.stream(LONG, seed=1)
    stream.add(PROMPTS, 0)
    live.kill()
    groups = rest(stream)
    assert essence(one for number in sorted(groups) for one in groups[number]) == first
    assert live.sampler.stats.restarts == 2

    live.write(2)
    version = live.stage()
    # its files may have been written over
    transport.remove_version(live.directory, int(version) - 1)
    live.kill()
    live.sampler.finish_weight_update(version)
    assert {one.policy_version for one in live.rollouts()} == {int(version)}
    assert live.answers(params=LONG) != first
    assert live.sampler.stats.restarts == MAX_RESTARTS

    live.kill()
    with pytest.raises(SamplerError, match=r"after 3 restarts: .*SIGKILL"):
        live.rollouts()
    assert {path.name for path in tmp_path.glob("*.log")} == {
        f"sampler{n}.log" for n in ("", "_1", "_2", "_3")
    }


@pytest.mark.engine
@pytest.mark.fault(
    "the engine dies ahead of the learner, as a version is written over the old one",
    "it comes back with the new one",
)
def test_it_does_not_read_what_is_written_over(live: Live) -> None:
    found = []
    with live.sampler.updating():
        live.kill()
        ahead = threading.Thread(target=lambda: found.extend(live.rollouts(params=LONG)))
        ahead.start()
        live.write(2)
        version = live.next_version
        transport.remove_version(live.directory, version - 1)
        ahead.join(5)  # is to be missed: no engine is there to be had
        live.load(version)
    ahead.join(300)
    assert {one.policy_version for one in found} == {version}
    assert live.sampler.stats.restarts == 1
