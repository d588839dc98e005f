"""Checkpoints as folders: complete ones are found, incomplete ones skipped, old ones removed."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from checkpoint_factory import forge, newest, save
from helpers import write_lines
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.checkpoint import checkpoints
from megatron_rl.checkpoint.checkpoints import IncompleteCheckpoint
from megatron_rl.checkpoint.resume import gap, newest_resumable, refuse_changes, rewind
from megatron_rl.config import ConfigError, from_mapping, to_yaml
from megatron_rl.config.plain_yaml import write_yaml
from megatron_rl.tracking.metrics_file import read_metrics

CONFIG: dict[str, Any] = {
    "run": {"steps": 4, "seed": 1, "stop": {"eval/accuracy": 0.5}},
    "optim": {"lr": 0.1, "megatron": {"clip_grad": 1.0}},
    "log": {"wandb": "none"},
    "learner": {
        "recompute": "none",
        "lora": {"rank": 8, "alpha": 16, "targets": ["all-linear"]},
    },
}


def test_a_whole_one_says_what_it_holds(tmp_path: Path) -> None:
    path = save(tmp_path, 4)
    size = sum(
        each.stat().st_size
        for each in path.rglob("*")
        if each.is_file() and each.name != "checkpoint.json"
    )
    found = checkpoints.verify(path)
    assert (
        found.step,
        found.updates,
        found.driver.position,
        found.nbytes,
    ) == (4, 8, 40, size)
    assert not list(tmp_path.glob(".*"))


def test_a_folder_that_cannot_be_read_is_no_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resume would begin at step 0."""
    save(tmp_path, 4)

    def refuse(*_: Any) -> None:
        raise PermissionError("Permission denied")

    for name in ("listdir", "scandir"):
        monkeypatch.setattr(os, name, refuse)
    with pytest.raises(PermissionError):
        checkpoints.steps(tmp_path)


def _cut(victim: Path, choice: random.Random) -> None:
    victim.write_bytes(victim.read_bytes()[: choice.randrange(victim.stat().st_size)])


def _flip(victim: Path, choice: random.Random) -> None:
    content = bytearray(victim.read_bytes())
    content[choice.randrange(len(content))] ^= 1 << choice.randrange(8)
    victim.write_bytes(content)


def _remove(victim: Path, choice: random.Random) -> None:
    victim.unlink()


@pytest.mark.fault(
    "a file of a checkpoint is cut, changed or missing", "it is passed over for the one before"
)
@pytest.mark.parametrize("damage", [_cut, _flip, _remove])
def test_one_that_is_damaged_is_passed_over(tmp_path: Path, damage: Any) -> None:
    save(tmp_path, 2)
    choice = random.Random(1)
    names = ("checkpoint.json", "rank_0.distcp", ".metadata", "sync.safetensors")
    for number in range(20):
        path = save(tmp_path, 4)
        (victim,) = path.rglob(names[number % len(names)])
        damage(victim, choice)
        step, said = newest(tmp_path)
        assert (step, len(said)) == (2, 1)
        assert victim.name in said[0]


ODD = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=9)
    | st.just("../../secret"),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.text(max_size=9),
            inner,
            max_size=3,
        )
    ),
)
PLACES: list[tuple[str, ...]] = [
    *(
        (name,)
        for name in ("format", "time", "step", "updates", "layout", "driver", "files", "best")
    ),
    *(("driver", name) for name in ("position", "seen", "line")),
    *(("driver", "seen", "samples"), ("layout", "tp"), ("files", "policy/.metadata")),
]


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    path = save(tmp_path_factory.mktemp("kept"), 4, score=0.5)
    return path, json.loads((path / "checkpoint.json").read_text())["content"]


@pytest.mark.fault(
    "any field of checkpoint.json is of any type, and its checksum is right",
    "it is whole, or named",
)
@given(place=st.sampled_from(PLACES), odd=ODD)
@settings(max_examples=100, deadline=None)
def test_a_manifest_of_any_types(
    kept: tuple[Path, dict[str, Any]], place: tuple[str, ...], odd: Any
) -> None:
    path, content = kept
    changed = json.loads(json.dumps(content))
    inner = changed
    for name in place[:-1]:
        inner = inner[name]
    inner[place[-1]] = odd
    forge(path, changed)
    try:
        found = checkpoints.verify(path)
    except IncompleteCheckpoint:
        return
    assert (
        found.step,
        type(found.updates),
        type(found.driver.position),
    ) == (4, int, int)
    assert found.best is None or type(found.best[1]) is float
    assert checkpoints.prune(path.parent, keep_last=1, metric="eval/accuracy") == []


@pytest.mark.fault(
    "checkpoint.json names what is not in its folder, or is no file", "it is refused, and not read"
)
@pytest.mark.parametrize(
    "name",
    ["../secret", "/dev/zero", "policy/../../secret", "link", "folder/x", "loop", "pipe", ".", ""],
)
def test_a_manifest_that_leads_out(tmp_path: Path, name: str) -> None:
    (tmp_path / "secret").write_text("secret")
    path = save(tmp_path / "checkpoints", 4)
    (path / "link").symlink_to("../../secret")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "x").write_text("secret")
    (path / "folder").symlink_to("../../elsewhere")
    (path / "loop").symlink_to("loop")
    os.mkfifo(path / "pipe")
    content = json.loads((path / "checkpoint.json").read_text())["content"]
    content["files"][name] = [6, checkpoints.digest(tmp_path / "secret")[1]]
    forge(path, content)
    with pytest.raises(IncompleteCheckpoint):
        checkpoints.verify(path)


@pytest.mark.fault(
    "a checkpoint, or what was begun of one, is a link", "what it leads to is left alone"
)
def test_links_in_the_place_of_checkpoints(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    elsewhere = save(tmp_path / "elsewhere", 4)
    save(root, 2)
    (root / "step_4").symlink_to(elsewhere)
    (root / ".step_6.partial").symlink_to(elsewhere)
    (root / "step_٣").mkdir()
    (root / ("step_" + "9" * 250)).mkdir()
    step, said = newest(root)
    assert step == 2
    assert "is a link" in said[0]
    checkpoints.clean(root)
    checkpoints.forget_after(root, 2)
    assert sorted(path.name for path in root.glob("step_?")) == ["step_2", "step_٣"]
    assert not list(root.glob(".*"))
    assert checkpoints.verify(elsewhere).step == 4


@pytest.mark.fault(
    "the folder of one step holds the checkpoint of another", "it is named, and passed over"
)
def test_a_checkpoint_under_another_name(tmp_path: Path) -> None:
    save(tmp_path, 2)
    shutil.copytree(tmp_path / "step_2", tmp_path / "step_4")
    step, said = newest(tmp_path)
    assert step == 2
    assert "step 2" in said[0]


def test_what_stays_is_the_last_ones_and_the_best(tmp_path: Path) -> None:
    for step, score in (
        (1, 0.2),
        (2, 0.9),
        (3, 0.9),
        (4, None),
        (5, 0.1),
        (6, None),
        (7, 0.3),
    ):
        save(tmp_path, step, score=score)
    removed = checkpoints.prune(tmp_path, keep_last=2, metric="eval/accuracy")
    assert checkpoints.steps(tmp_path) == [7, 6, 2]  # 2: of the two best the first
    assert sorted(removed) == [1, 3, 4, 5]


@pytest.mark.fault(
    "a full disk has not taken a line of the records",
    "the run goes on from before the gap, or says so",
)
def test_a_gap_in_the_records(tmp_path: Path) -> None:
    for step in (2, 4, 6):
        save(tmp_path / "checkpoints", step)
    lines = [{"progress/step": step} for step in range(7)]
    write_lines(tmp_path / "metrics.jsonl", lines)
    said: list[str] = []
    assert newest_resumable(tmp_path, said.append).step == 6
    assert said == []
    write_lines(tmp_path / "ledger.jsonl", [{"step": step} for step in (1, 2, 3, 5, 6)])
    assert newest_resumable(tmp_path, said.append).step == 2
    assert len(said) == 2
    assert "ledger.jsonl" in said[1] and "step 4" in said[1]
    write_lines(tmp_path / "metrics.jsonl", lines[1:])
    assert newest_resumable(tmp_path, said.append).step == 6
    assert "step 6" in said[-1]


def test_records_after_the_checkpoint_are_taken_back(tmp_path: Path) -> None:
    lines = [{"progress/step": step, "loss/total": 0.5} for step in range(6)]
    write_lines(tmp_path / "metrics.jsonl", lines, '{"progress/step": 2, "lo')
    write_lines(tmp_path / "ledger.jsonl", [{"step": step} for step in range(1, 6)])
    (tmp_path / "rollouts").mkdir()
    for name in ("step_2", "step_3", "step_x"):
        (tmp_path / "rollouts" / f"{name}.parquet").touch()
    for step in (2, 4):
        save(tmp_path / "checkpoints", step)
    rewind(tmp_path, 2)
    assert read_metrics(tmp_path / "metrics.jsonl") == lines[:3]
    assert (tmp_path / "ledger.jsonl").read_text() == '{"step": 1}\n{"step": 2}\n'
    assert sorted(path.stem for path in (tmp_path / "rollouts").iterdir()) == ["step_2", "step_x"]
    assert checkpoints.steps(tmp_path / "checkpoints") == [2]


@pytest.mark.parametrize(
    ("key", "value", "refused"),
    [
        ("run.steps", 9, False),
        ("run.stop", {"eval/accuracy": 0.9}, False),
        ("run.stop", None, False),
        ("log.wandb", "offline", False),
        ("learner.recompute", "full", False),
        ("run.seed", 2, True),
        ("optim.lr", 0.2, True),
        ("optim.megatron.clip_grad", 2.0, True),
        ("optim.megatron.adam_beta1", 0.5, True),  # a key that was left out before
        ("optim.min_lr", 0.1, True),  # one that an older version did not know
        ("optim.min_lr", 0.0, False),  # and what stands for it there
    ],
)
def test_a_changed_recipe_is_reported_key_by_key(
    tmp_path: Path, key: str, value: object, refused: bool
) -> None:
    recorded = tmp_path / "config.yaml"
    recorded.write_text(write_yaml(CONFIG))
    new = json.loads(json.dumps(CONFIG))
    *sections, name = key.split(".")
    inner = new
    for section in sections:
        inner = inner[section]
    inner[name] = value
    if refused:
        with pytest.raises(ConfigError, match=rf"(?s){key}: .* -> {value}.*resume_allow=\[{key}\]"):
            refuse_changes(recorded, to_yaml(from_mapping(new)))
        new["run"]["resume_allow"] = [key]
    refuse_changes(recorded, to_yaml(from_mapping(new)))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rank", 4),
        ("rank", 0),
        ("alpha", 8),
        ("targets", ["q_proj"]),
    ],
)
def test_lora_adapters_cannot_change_even_if_allowed(
    tmp_path: Path, key: str, value: object
) -> None:
    (tmp_path / "config.yaml").write_text(write_yaml(CONFIG))
    learner = {"lora": CONFIG["learner"]["lora"] | {key: value}}
    new = CONFIG | {"learner": learner, "run": {"resume_allow": [f"learner.lora.{key}"]}}
    with pytest.raises(ConfigError, match=rf"(?s)learner\.lora\.{key}: .*Undo that\. Other"):
        refuse_changes(tmp_path / "config.yaml", to_yaml(from_mapping(new)))


@pytest.mark.fault("the ledger of a run to go on with is a pipe", "it is refused at once")
def test_records_that_are_pipes(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "ledger.jsonl")
    with pytest.raises(OSError, match="no regular file"):
        gap(tmp_path, 1)
