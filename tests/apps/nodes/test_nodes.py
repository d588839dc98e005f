"""Check of a job's nodes, as local processes: each problem names its node."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from nvidia_smi import H100, nvidia_smi

from megatron_rl.apps.nodes import check
from megatron_rl.apps.nodes.check import Gpu, Problem, State, judge
from megatron_rl.config import from_mapping
from megatron_rl.processes.process import free_port

ROOT = Path(__file__).parents[3]
QUICKSTART = ROOT / "recipes" / "quickstart.yaml"


def looks(
    tmp_path: Path, *overrides: str, port: int = 0, **nodes: dict[str, str]
) -> tuple[int, str, str]:
    """A process for each node, in its own environment and folder (`cwd`)."""
    common = {
        "PYTHONPATH": str(ROOT),
        "MEGATRON_RL_NODES": ",".join(f"{node}=127.0.0.1" for node in nodes),
        "MEGATRON_RL_PORT": str(port or free_port()),
    }
    module = [sys.executable, "-m", "megatron_rl.apps.nodes.check"]
    started = []
    for node, own in nodes.items():
        one = subprocess.Popen(
            [*module, str(len(nodes)), str(QUICKSTART), "run.root=shared/runs", *overrides],
            cwd=own.get("cwd", tmp_path),
            text=True,
            env=os.environ | common | own | {"SLURMD_NODENAME": node},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        started.append(one)
    said = [one.communicate(timeout=300) for one in started]
    assert [one.returncode for one in started[1:]] == [0] * (len(nodes) - 1)
    return started[0].returncode, *said[0]


@pytest.mark.ranks
def test_two_nodes_as_they_should_be(tmp_path: Path) -> None:
    assert looks(tmp_path, n1={}, n2={}) == (0, "", "")
    assert not list((tmp_path / "shared" / "runs").iterdir())


@pytest.mark.ranks
@pytest.mark.fault(
    "a node does not share a folder, another one has a library of its own",
    "both are named, status 2",
)
def test_bad_nodes_are_named(tmp_path: Path) -> None:
    about = tmp_path / "own" / "torch-9.9.dist-info"
    elsewhere = tmp_path / "elsewhere"
    about.mkdir(parents=True)
    elsewhere.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 9.9\n")
    other = {"PYTHONPATH": f"{about.parent}:{ROOT}"}
    status, names, said = looks(
        tmp_path,
        n1={},
        n2={"cwd": str(elsewhere)},
        n3=other,
    )
    assert (status, names) == (2, "n3,n2\n")
    library, folder = said.splitlines()
    assert "n3: torch is 9.9" in library
    assert check.versions()["torch"] in library
    assert "node n2: run.root=shared/runs" in folder
    assert not list((tmp_path / "shared" / "runs").iterdir())


@pytest.mark.fault(
    "a node of a job does not come up", "it is named, with the status of what may pass"
)
def test_a_node_that_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "ARRIVE_S", 2.0)
    nodes = {"n1": "127.0.0.1", "n2": "127.0.0.1"}
    meeting = check.Meeting("n1", nodes, free_port())
    folders = {"run.root": tmp_path}
    (problem,) = meeting.compare(folders, {}, 0.0)
    assert problem.node == "n2"
    assert not problem.lasting
    assert not list(tmp_path.iterdir())


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        status, _, said = looks(tmp_path, port=taken.getsockname()[1], n1={})
    assert status == 75
    assert "Address already in use" in said


GOOD = Gpu(H100, 79.6, 0.5)
TWO = State(gpus=[GOOD] * 2)
FOLDER = Problem("n2", "run.root=r cannot be written", False)
SMALL = Gpu("NVIDIA A100", 40, 0)
UNFIT = Gpu(H100, 79.6, 0.5, "too old")
IN_USE = Gpu(H100, 79.6, 40)
BAD = {
    "another version": (State({"vllm": "0.32.0"}), State(), True),
    "too few GPUs": (TWO, State(gpus=[GOOD]), True),
    "a smaller GPU": (TWO, State(gpus=[GOOD, SMALL]), True),
    "a driver too old": (TWO, State(gpus=[UNFIT] * 2), True),
    "a GPU in use": (TWO, State(gpus=[GOOD, IN_USE]), False),
    "a folder": (State(), State(problems=[FOLDER]), False),
}


@pytest.mark.parametrize("name", BAD)
def test_the_bad_node_and_no_other_is_named(name: str) -> None:
    first, second, lasting = BAD[name]
    wanted = {"n1": 2, "n2": 2} if first.gpus else {}
    states = {"n1": first, "n2": second}
    (problem,) = judge(states, wanted, 80)
    assert problem.node == "n2"
    assert problem.lasting == lasting


def test_nothing_is_wrong_with_two_equal_nodes() -> None:
    state = State({"torch": "2"}, [GOOD] * 9)
    assert judge({"n1": state, "n2": state}, {"n1": 8}, 80) == []


def test_gpus_that_each_node_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks, the embedded engine's GPUs on the first node, and the servers'."""
    nvidia_smi(tmp_path, 2, used=40960)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    gib = 81559 / 1024
    assert check.gpus() == [Gpu(H100, gib, 561 / 1024), Gpu(H100, gib, 40.0)]
    learner = {"tensor_parallel": 4, "data_parallel": 4}
    embedded = {"devices": "8,9", "tensor_parallel": 2}
    sections = {"learner": learner, "sampler": embedded}
    config = from_mapping(sections)
    assert check.wanted_gpus(config, ["n1", "n2"], 2) == {"n1": 10, "n2": 8}
    servers = {"tensor_parallel": 2, "engines": 3, "dedicated_nodes": True}
    config = from_mapping({"learner": learner, "sampler": servers})
    nodes = ["n1", "n2", "n3", "n4"]
    assert check.wanted_gpus(config, nodes, 2) == {"n1": 8, "n2": 8, "n3": 4, "n4": 4}
    assert (
        check.wanted_gpus(
            from_mapping({"run": {"device": "cpu"}}),
            ["n1"],
            1,
        )
        == {}
    )
