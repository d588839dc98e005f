"""`megatron-rl plan --precision`: seconds of a step by the sampler's format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers import Command, block, typed

from megatron_rl.apps.planner import precision

ROOT = Path(__file__).parents[3]
DAPO = str(ROOT / "recipes" / "dapo_fp8.yaml")


def rows(command: Command, *words: object) -> dict[str, dict[str, Any]]:
    said = command("plan", *words, "--precision", "--json")
    return {row["name"]: row for row in json.loads(said)}


def test_a_node_of_gpus(command: Command) -> None:
    found = rows(command, DAPO, "--on", "1x8xH100-80")
    assert list(found) == ["BF16", "INT8", "FP8", "FP8, FP8 cache"]
    plain = found["BF16"]
    fp8 = found["FP8"]
    assert plain["ratio"] == 1
    assert plain["quantizing"] == 0
    assert fp8["quantizing"] > 0
    seconds = {name: row["seconds"] for name, row in found.items()}
    rollouts = [seconds[name]["rollout"] for name in ("FP8, FP8 cache", "FP8", "BF16")]
    assert rollouts == sorted(rollouts)
    assert seconds["FP8"]["sync"] < seconds["BF16"]["sync"]
    assert seconds["FP8"]["update"] == seconds["BF16"]["update"]
    for row in found.values():
        assert row["step"] == pytest.approx(sum(row["seconds"].values()))
        assert row["ratio"] == pytest.approx(row["step"] / plain["step"])


def test_asynchronous_rollouts_overlap(command: Command) -> None:
    row = rows(command, ROOT / "recipes/dapo-qwen3_8b-1n8g-int8-ahead.yaml")["FP8"]
    seconds = row["seconds"]
    shorter = min(seconds["rollout"], seconds["prox"] + seconds["update"] + seconds["save"])
    assert row["step"] == pytest.approx(sum(seconds.values()) - shorter)


@pytest.mark.parametrize(
    ("machine", "without"), [("1x8xB200", {"INT8"}), ("1x8xA100-80", {"FP8", "FP8, FP8 cache"})]
)
def test_formats_without_a_kernel_are_left_out(
    command: Command, machine: str, without: set[str]
) -> None:
    found = rows(command, DAPO, "--on", machine)
    assert precision.NAMES.keys() - found.keys() == without
    said = command("plan", DAPO, "--on", machine, "--precision")
    for name in without:
        assert f"left out  {name}: " in said


def test_a_machine_without_known_gpus_is_refused(place: Path, command: Command) -> None:
    assert "--on 1x8xH100-80" in command("plan", "mine.yaml", "--precision", status=2)


def test_the_page_s_commands(empty: Path) -> None:
    (empty / "recipes").symlink_to(ROOT / "recipes")
    for line in block(ROOT / "docs" / "concepts" / "precision.md", "bash").splitlines():
        assert "FP8, FP8 cache" in typed(empty, line)
