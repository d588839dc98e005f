"""Timeline of a run: recorded spans, and the chart's share of them."""

from pathlib import Path

import pytest

from megatron_rl.apps.reports.run_data import read_lanes
from megatron_rl.tracking.timeline import Span, encode_spans


@pytest.fixture
def lanes(tmp_path: Path) -> Path:
    """Steps of a second; the sampler is one step ahead, and its second half comes in pieces."""
    lines = []
    for step in range(1, 12):
        sampler = [
            Span("sampler", step - 1.0, step - 0.5),
            Span("sampler", step - 0.499, step - 0.1),
        ]
        lines.append(
            encode_spans(
                step,
                [
                    *sampler,
                    Span("update", step + 0.2, step + 0.9),
                    Span("other", 0, 1),
                ],
            )
        )
    path = tmp_path / "timeline.jsonl"
    path.write_text("\n".join([*lines, lines[0][:20], ""]))  # with an incomplete one
    return path


def test_some_steps_of_the_middle_are_shown_with_what_else_happened_then(lanes: Path) -> None:
    found = read_lanes(lanes, steps=3)
    updates = [one for one in found if one.lane == "update"]
    assert [one.step for one in updates] == [5, 6, 7]
    assert updates[0].begin == 0 and updates[-1].end == pytest.approx(2.7, abs=0.01)
    # pieces that are closer together than an eye can see are one; those of steps before and after
    # are cut at the edges
    sampler = [one for one in found if one.lane == "sampler"]
    assert [one.step for one in sampler] == [6, 7, 8]
    assert all(0 <= one.begin < one.end <= 2.71 for one in found)
    assert {one.lane for one in found} == {"sampler", "update"}


def test_a_run_without_lanes(tmp_path: Path) -> None:
    assert read_lanes(tmp_path / "timeline.jsonl") == []
