"""Traces of chosen steps, cut at the end of each pass; the dump of a GPU out of memory."""

import gzip
import json
from pathlib import Path

import pytest
import torch
from helpers import logged
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_rl.learner.profile import MICRO_BATCHES, Profiler, dump_on_oom


def passes(profiler: Profiler, step: int, *counts: int) -> None:
    with profiler.step(step):
        for count in counts:
            with profiler.tracing("forward", count):
                for number in range(count):
                    profiler.micro_batch()
                    with torch.profiler.record_function(f"micro-batch {number}"):
                        torch.ones(4) @ torch.ones(4)


def names(trace: Path) -> set[str]:
    return {
        event["name"] for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    }


def test_the_last_micro_batches_of_each_pass_in_the_chosen_steps(tmp_path: Path) -> None:
    notes = logged()
    profiler = Profiler([2, 4], tmp_path, 3)
    for step in range(1, 4):
        passes(profiler, step, MICRO_BATCHES + 2, 1, 0)
    with profiler.tracing("forward", 1):  # a probe's, outside a step
        profiler.micro_batch()
    first, second = sorted((tmp_path / "profile_2").iterdir())
    assert first.name == "rank_3_pass_1_forward.json.gz" and "aten::dot" in names(first)
    assert {name for name in names(first) if name.startswith("micro")} == {
        "micro-batch 2",
        "micro-batch 3",
    }
    assert "micro-batch 0" in names(second)
    assert [entry.name for entry in tmp_path.iterdir()] == ["profile_2"]
    (note,) = notes
    assert str(first.parent) in note


@pytest.mark.parametrize("rank", [0, None])
def test_nothing_is_recorded_elsewhere(tmp_path: Path, rank: int | None) -> None:
    passes(
        Profiler([1] if rank is None else [], tmp_path, rank),
        1,
        2,
    )
    assert not list(tmp_path.iterdir())


def test_a_trace_without_a_place_does_not_end_the_run(tmp_path: Path) -> None:
    notes = logged()
    (tmp_path / "profile_1").write_text("in the way")
    passes(Profiler([1], tmp_path, 0), 1, 1)
    assert len(notes) == 1


def test_where_memory_runs_out_the_error_names_a_list_of_what_fills_it(tmp_path: Path) -> None:
    held = [torch.zeros(1 << 20, 3, dtype=torch.int16) for _ in range(2)]
    with FakeTensorMode():  # as torch.compile leaves them
        held += [torch.zeros(9)]
    with pytest.raises(torch.OutOfMemoryError) as caught, dump_on_oom(tmp_path / "dumps", 1):
        raise torch.OutOfMemoryError("CUDA out of memory.")
    path = tmp_path / "dumps" / "memory_rank_1.txt"
    assert str(path) in str(caught.value)
    assert "cpu int16 [1048576, 3]" in path.read_text()
