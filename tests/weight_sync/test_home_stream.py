"""In which order a transport's streams see weights: stand-ins for streams write down what is asked of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from megatron_rl.weight_sync.whole_source import made_on


class Stream:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: Stream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")


class Tensor:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def record_stream(self, stream: Stream) -> None:
        self.log.append(f"{self.name} stays for {stream.name}")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens, while torch.cuda knows the stand-ins for its streams."""
    happened: list[str] = []
    present = [Stream("home", happened)]

    @contextmanager
    def stream(entered: Stream) -> Iterator[None]:
        present.append(entered)
        try:
            yield
        finally:
            present.pop()

    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: present[-1])
    return happened


def test_a_side_stream_gets_tensors_that_home_has_made(log: list[str]) -> None:
    def pairs() -> Iterator[tuple[str, Tensor]]:
        for name in ("first", "second"):
            log.append(f"{name} is made on {torch.cuda.current_stream().name}")
            yield name, Tensor(name, log)

    home, sides = torch.cuda.current_stream(), [Stream("left", log), Stream("right", log)]
    made = made_on(home, pairs())
    for side in sides:
        with torch.cuda.stream(side):
            name, _ = next(made)
            log.append(f"{name} is read on {torch.cuda.current_stream().name}")
    assert next(made, None) is None
    assert log == [
        "first is made on home", "left waits for home", "first stays for left", "first is read on left",
        "second is made on home", "right waits for home", "second stays for right", "second is read on right",
    ]  # fmt: skip


def test_what_is_left_when_the_sender_has_failed_is_made_at_home_too(log: list[str]) -> None:
    """The drain: other ranks are still in the middle of the pass."""
    places = []

    def pairs() -> Iterator[tuple[str, Tensor]]:
        try:
            for name in ("first", "second"):
                places.append(torch.cuda.current_stream().name)
                yield name, Tensor(name, log)
        finally:
            places.append("end")

    made = made_on(torch.cuda.current_stream(), pairs())
    with torch.cuda.stream(Stream("side", log)):
        next(made)
    assert [name for name, _ in made] == ["second"]
    assert places == ["home", "home", "end"]
