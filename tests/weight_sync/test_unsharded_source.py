"""All writers' tensors on rank 0, or on every rank, for transports with one sender; on which stream
they are made.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from spawned import run_ranks
from unsharded_rank import CASES

from megatron_rl.weight_sync.unsharded_source import made_on


@pytest.mark.ranks
def test_two_writers_in_one_order(tmp_path: Path) -> None:
    codes, (first, second) = run_ranks("unsharded_rank", tmp_path)
    assert codes == [0, 0]
    for case in CASES:
        for everywhere in (False, True):
            here = first[f"{case} {everywhere}"]
            there = second[f"{case} {everywhere}"]
            assert here["metas"] == there["metas"]
            count = len(here["metas"])
            assert here["passes"] == [count, count]
            assert there["passes"] == ([count, count] if everywhere else [0, 0])
    assert first["interrupted"] == [True, None]
    assert second["interrupted"] == [False, None]
    count = len(first["stages False"]["metas"])
    assert first["diverged"] == [count, None]
    assert second["diverged"][0] == 0
    assert "layers.3.mlp.down_proj.weight" in second["diverged"][1]


def test_a_side_stream_gets_tensors_that_home_has_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins for streams write down what is asked of them. The last tensor is drained: the
    sender has failed.
    """
    log = []

    def a_stream(name: str) -> SimpleNamespace:
        return SimpleNamespace(
            name=name, wait_stream=lambda other: log.append(f"{name} waits for {other.name}")
        )

    present = [a_stream("home")]

    @contextmanager
    def entered(stream: SimpleNamespace) -> Iterator[None]:
        present.append(stream)
        yield
        present.pop()

    monkeypatch.setattr(torch.cuda, "stream", entered)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: present[-1])

    def pairs() -> Iterator[tuple[str, SimpleNamespace]]:
        for name in ("first", "second", "third"):
            log.append(f"{name} is made on {present[-1].name}")
            stays = lambda stream, name=name: log.append(f"{name} stays for {stream.name}")  # noqa: E731
            yield name, SimpleNamespace(record_stream=stays)
        log.append(f"the end is on {present[-1].name}")

    made = made_on(present[0], pairs())
    for side in ("left", "right"):
        with torch.cuda.stream(a_stream(side)):
            name, _ = next(made)
            log.append(f"{name} is read on {present[-1].name}")
    assert [name for name, _ in made] == ["third"]
    assert log == [
        "first is made on home",
        "left waits for home",
        "first stays for left",
        "first is read on left",
        "second is made on home",
        "right waits for home",
        "second stays for right",
        "second is read on right",
        "third is made on home",
        "home waits for home",
        "third stays for home",
        "the end is on home",
    ]
