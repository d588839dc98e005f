"""Folders of runs that ended badly: what can be read is shown, and what cannot is named."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import Command
from run_factory import make_run, make_scored, start

from megatron_rl.tracking.metrics_file import read_lines, read_metrics
from megatron_rl.tracking.rollout_file import read_rollouts

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs"), "run", steps=20)


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return shutil.copytree(whole, tmp_path / "run")


def cut(share: float) -> Callable[[Path], None]:
    def tear(path: Path) -> None:
        path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])

    return tear


def replaced(text: str) -> Callable[[Path], None]:
    return lambda path: path.write_text(text) and None


def added(text: str) -> Callable[[Path], None]:
    def add(path: Path) -> None:
        with path.open("a") as file:
            file.write(text)

    return add


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGED: dict[str, list[Callable[[Path], None]]] = {
    "rollouts/step_10.parquet": [cut(0), cut(0.5), cut(0.99), replaced("PAR1")],
    "status.json": [cut(0), cut(0.5), replaced("[]"), folder],
    "env.json": [folder, cut(0.5), replaced("[]"), cut(0)],
    "config.yaml": [Path.unlink, replaced("a: [b"), replaced("- 1"), folder],
    "metrics.jsonl": [
        Path.unlink,
        added("{}\n"),
        added('{"loss/total": 1}\n'),
        added('{"progress/st'),
    ],
    "rollouts/step_x.parquet": [replaced("x")] * 4,
}
LINES = [
    '{"progress/step": ' + step + "}" for step in ('"x"', "null", "1e999", "[]", "NaN", "9" * 5000)
]
LINES += ["[" * 100_000, "[1]", "null", "", "\x00", "\xff"]


@pytest.mark.fault(
    "files of a run's folder are incomplete or of another type",
    "the report shows the rest, and names them",
)
@pytest.mark.parametrize("number", range(4))
def test_a_report_of_an_incomplete_folder(run: Path, command: Command, number: int) -> None:
    for name, damages in DAMAGED.items():
        damages[number](run / name)
    said = command("report", run)
    html = (run / "report.html").read_text()
    for name in DAMAGED:
        assert all(Path(name).name in text.partition("ot readable")[2] for text in (said, html)), (
            name,
            said,
        )
    assert ("Held-out accuracy" in html) == (number > 0)


@pytest.mark.fault(
    "lines of metrics say no step, or are no lines", "they are counted, the others are shown"
)
def test_odd_lines_are_counted(whole: Path, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    shutil.copy(whole / "metrics.jsonl", path)
    added("\n".join(LINES) + "\n")(path)
    lines, incomplete = read_lines(path)
    assert incomplete == len(LINES)
    assert repr(lines) == repr(read_metrics(whole / "metrics.jsonl"))


@pytest.mark.fault("a recorded step is incomplete", "replay uses the others, and names it")
def test_a_replay_of_an_incomplete_folder(run: Path, command: Command) -> None:
    cut(0.5)(run / "rollouts" / "step_10.parquet")
    replay = ("replay", run, "--corrections", "none")
    said = command(*replay)
    assert said.startswith("1 recorded steps")
    assert "not readable: rollouts/step_10.parquet" in said
    cut(0)(run / "rollouts" / "step_20.parquet")
    assert "step_20.parquet" in command(*replay, status=2)
    (run / "config.yaml").write_text("correction: [")
    assert "config.yaml" in command(*replay, status=2)


@pytest.mark.fault(
    "a recorded response is looked up", "its prompt and ground truth are recorded with it"
)
def test_prompt_and_truth_are_recorded(tmp_path: Path) -> None:
    recorder = start(tmp_path / "run", steps=1)
    scored, _ = make_scored(4)
    recorder.rollouts(
        1,
        scored,
        truths=["2", 7, {"a": ["é"]}, None],
    )
    rows = read_rollouts(tmp_path / "run" / "rollouts" / "step_1.parquet").to_pylist()
    assert [row["truth"] for row in rows] == ["2", "7", '{"a": ["é"]}', None]
    assert {row["prompt"] for row in rows} == {"1+1="}
