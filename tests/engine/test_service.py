"""Requests of several connections to one engine: each reply goes to its sender only."""

import threading
from typing import Any

import pytest

from megatron_rl.engine.service import Service


class RecordingLine:
    def __init__(self) -> None:
        self.sent: list[list[dict[str, Any]]] = []

    def send(self, frames: list[dict[str, Any]]) -> None:
        self.sent.append(frames)

    @property
    def replies(self) -> dict[int, Any]:
        return {
            one["id"]: one.get("value", one.get("error")) for frames in self.sent for one in frames
        }


class RecordingEngine:
    """Engine that finishes samples in the second step after their arrival, last first; fails on
    request.
    """

    def __init__(self) -> None:
        self.open: dict[int, int] = {}  # steps that are left, by number
        self.first: list[int] = []  # what the first step began with
        self.broken = False
        self.samples = self

    @property
    def writes(self) -> bool:
        return bool(self.open)

    def must_wait(self, method: str) -> bool:
        return method == "values" and self.writes

    def begin(self, number: int, tokens: list[int]) -> None:
        if tokens == [0]:
            raise ValueError("no such token")
        self.open[number] = 2

    def cancel(self, numbers: list[int]) -> None:
        for number in numbers:
            del self.open[number]

    def status(self) -> str:
        return f"open: {len(self.open)}"

    values = status

    def stop(self) -> None:
        self.broken = True

    def step(self) -> list[tuple[int, Any]]:
        self.first = self.first or list(self.open)
        self.open = {number: left - 1 for number, left in self.open.items()}
        finished = [number for number, left in self.open.items() if left == 0]
        return [
            (number, f"sample {number}")
            for number in reversed(finished)
            if self.open.pop(number) == 0
        ]


def sample(number: int, *tokens: int) -> dict[str, Any]:
    return asked(number, "generate", tokens=list(tokens))


def asked(number: int, method: str, **arguments: Any) -> dict[str, Any]:
    return {"id": number, "method": method, "arguments": arguments}


@pytest.fixture
def service() -> Service:
    return Service()


def run(service: Service) -> RecordingEngine:
    """Until there is nothing left to do: `values` waits for that, and what follows ends it."""
    engine = RecordingEngine()
    last = RecordingLine()
    last.send = lambda frames: service.ask(last, [asked(0, "stop")])
    service.ask(last, [asked(0, "values")])
    thread = threading.Thread(target=service.run, args=[engine], daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    return engine


def test_what_is_asked_together_begins_in_one_step_and_its_answers_travel_together(service):
    one = RecordingLine()
    other = RecordingLine()
    service.ask(one, [sample(7, 1), sample(8, 1)])
    service.ask(other, [sample(7, 1), asked(9, "status")])
    engine = run(service)
    assert engine.first == [1, 2, 3]
    assert [[frame["id"] for frame in frames] for frames in one.sent] == [[8, 7]]
    assert one.replies == {7: "sample 1", 8: "sample 2"}
    assert other.replies == {7: "sample 3", 9: "open: 3"}, "numbers are each line's own"


def test_samples_of_a_closed_connection_are_cancelled(service):
    one = RecordingLine()
    other = RecordingLine()
    service.ask(one, [sample(7, 1)])
    service.ask(
        other,
        [
            sample(7, 1),
            sample(8, 1),
            asked(9, "cancel", requests=[8]),
        ],
    )
    service.hung_up(one)
    run(service)
    assert one.sent == []
    assert other.replies == {7: "sample 2", 9: None}


@pytest.mark.fault(
    "a request that fails in an engine", "its sender gets the error; other requests complete"
)
def test_one_failure_spoils_no_neighbour(service):
    line = RecordingLine()
    service.ask(
        line,
        [
            sample(1, 0),
            sample(2, 1),
            asked(3, "status", x=1),
        ],
    )
    run(service)
    assert line.replies[1] == {"type": "ValueError", "message": "no such token"}
    assert line.replies[2] == "sample 2"
    assert line.replies[3]["type"] == "TypeError"


def test_what_has_to_wait_for_samples_does(service):
    line = RecordingLine()
    service.ask(
        line,
        [
            sample(1, 1),
            asked(2, "values"),
            asked(3, "status"),
        ],
    )
    run(service)
    assert line.replies == {3: "open: 1", 1: "sample 1", 2: "open: 0"}
