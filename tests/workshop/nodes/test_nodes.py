"""The nodes of a job look at each other: what they find is laid to the right one, in one
sentence.
"""

import errno
import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from nvidia_smi import nvidia_smi

from megatron_rl.config import from_mapping
from megatron_rl.processes.process import free_port
from megatron_rl.workshop.nodes import check, facts
from megatron_rl.workshop.nodes.facts import Facts, Gpu, Needs, judge

ROOT = Path(__file__).parents[3]
OLD = "the NVIDIA driver is 550.127.08, and torch needs a newer one"
QUICKSTART = ROOT / "recipes" / "quickstart.yaml"
H100 = Gpu("NVIDIA H100 80GB HBM3", 79.6, 0.5)


def path_with(tmp_path: Path, node: str, driver: str) -> dict[str, str]:
    """The environment of a node of two GPUs."""
    (tmp_path / node).mkdir()
    nvidia_smi(tmp_path / node, 2, driver)
    return {"PATH": f"{tmp_path / node}:{os.environ['PATH']}"}


def looks(
    tmp_path: Path, learning: int, *overrides: str, **nodes: dict[str, str]
) -> tuple[int, str, str]:
    """A process for each node, with the environment that is its own; `cwd` is where it runs."""
    addresses = ",".join(f"{node}=127.0.0.1" for node in nodes)
    port = str(free_port())
    common = {"PYTHONPATH": str(ROOT), "MEGATRON_RL_NODES": addresses, "MEGATRON_RL_PORT": port}
    command = [
        sys.executable,
        "-m",
        "megatron_rl.workshop.nodes.check",
        str(learning),
        str(QUICKSTART),
    ]
    started = [
        subprocess.Popen(
            [*command, "run.root=shared/runs", *overrides],
            cwd=own.get("cwd", tmp_path),
            text=True,
            env=os.environ | common | own | {"SLURMD_NODENAME": node},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for node, own in nodes.items()
    ]
    said = [one.communicate(timeout=300) for one in started]
    assert [one.returncode for one in started[1:]] == [0] * (len(nodes) - 1)
    return started[0].returncode, *said[0]


@pytest.mark.ranks
def test_two_nodes_as_they_should_be(tmp_path: Path) -> None:
    """Up to the sum over both, by gloo."""
    assert looks(tmp_path, 2, n1={}, n2={}) == (0, "", "")
    assert not list((tmp_path / "shared" / "runs").iterdir())


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
    status, names, said = looks(tmp_path, 1, n1={}, n2={"cwd": str(elsewhere)}, n3=other)
    assert (status, names) == (2, "n3,n2\n")
    usual = facts.versions()["torch"]
    assert said.splitlines() == [
        f"nodes: node n3: torch is 9.9, on the other nodes {usual}",
        "nodes: node n2: run.root=shared/runs is not there, as it is on n1: it has to be shared",
    ]
    assert not list((tmp_path / "shared" / "runs").iterdir())


@pytest.mark.fault(
    "a node of a job does not come up", "it is named, with the status of what may pass"
)
def test_a_node_that_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "ARRIVE_S", 2.0)
    nodes = {"n1": "127.0.0.1", "n2": "127.0.0.1"}
    (problem,) = check.lead(nodes, free_port(), Needs(), [("run.root", tmp_path)], 2)
    assert str(problem) == "node n2: nothing heard of it on n1 within 2 s"
    assert not problem.lasting


def test_a_stranger_is_nobody(tmp_path: Path) -> None:
    nodes = {"n1": "127.0.0.1"}
    port = free_port()

    def talk() -> None:
        for said in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, b""):
            with suppress(OSError), socket.create_connection(("127.0.0.1", port)) as one:
                one.sendall(said)

    with ThreadPoolExecutor(1) as pool:
        led = pool.submit(check.lead, nodes, port, Needs(), [("run.root", tmp_path)], 1)
        while not led.done():
            talk()
    assert led.result() == []


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        nodes = {"n1": "127.0.0.1"}
        (problem,) = check.lead(nodes, port, Needs(), [], 1)
    assert str(problem) == f"node n1: cannot listen at 127.0.0.1:{port}: Address already in use"


N1 = Facts("n1")
N2 = Facts("n2")
TWO = Facts("n1", gpus=[H100] * 2)
STALE = ("cannot be written: Stale file handle", False)
# what is said of a node, whether it lasts, and what the nodes have told
CASES: list[tuple[str, bool, list[Facts]]] = [
    (
        "node n3: no TCP connection between it and n1, n2 (slurm/network.env)",
        False,
        [replace(N1, unreached=["n3"]), replace(N2, unreached=["n3"]), Facts("n3")],
    ),
    (
        "node n2: no TCP connection between it and n1 (slurm/network.env)",
        False,
        [N1, replace(N2, unreached=["n1"])],
    ),
    ("node n2: its clock is 7.2 s ahead of n1's", False, [N1, replace(N2, ahead_s=7.2)]),
    ("node n2: its clock is 7.2 s behind n1's", False, [N1, replace(N2, ahead_s=-7.2)]),
    (
        "node n2: vllm is none, on the other nodes 0.32.0",
        True,
        [replace(N1, versions={"vllm": "0.32.0"}), N2],
    ),
    ("node n2: 1 GPUs, the recipe needs 2 here", True, [TWO, replace(N2, gpus=[H100])]),
    (
        "node n2: GPU 1 (NVIDIA A100) has 40 GiB, the recipe's cluster 80",
        True,
        [TWO, replace(N2, gpus=[H100, Gpu("NVIDIA A100", 40, 0)])],
    ),
    (
        "node n2: the NVIDIA driver is 550.127.08, and torch needs a newer one",
        True,
        [TWO, replace(N2, gpus=[replace(H100, unfit=OLD)] * 2)],
    ),
    (
        "node n2: GPU 1 has 40 GiB in use by another process",
        False,
        [TWO, replace(N2, gpus=[H100, replace(H100, used_gib=40)])],
    ),
    (
        "node n2: s=s cannot be written: Stale file handle",
        False,
        [N1, replace(N2, folders={"s=s": STALE})],
    ),
]


@pytest.mark.parametrize(("sentence", "lasting", "nodes"), CASES)
def test_sentences(sentence: str, lasting: bool, nodes: list[Facts]) -> None:
    needs = Needs({"n1": 2, "n2": 2}, 80, cuda=True) if any(one.gpus for one in nodes) else Needs()
    (problem,) = judge(nodes, needs)
    assert (str(problem), problem.lasting) == (sentence, lasting)


def test_nothing_is_wrong_with_two_equal_nodes() -> None:
    assert (
        judge(
            [Facts(node, 0.2, {"torch": "2"}, [H100] * 9) for node in ("n1", "n2")],
            Needs({"n1": 8}, 80),
        )
        == []
    )


@pytest.mark.ranks
def test_a_node_whose_driver_torch_cannot_use_is_named(tmp_path: Path) -> None:
    nodes = {
        "n1": path_with(tmp_path, "n1", "580.95.05"),
        "n2": path_with(tmp_path, "n2", "550.127.08"),
    }
    status, bad, said = looks(tmp_path, 2, "run.device=cuda", **nodes)
    assert (status, bad) == (2, "n2\n")
    assert (
        said
        == "nodes: node n2: the NVIDIA driver is 550.127.08, and torch, built for CUDA 13, needs 580 or newer\n"
    )


@pytest.mark.ranks
@pytest.mark.skipif("__import__('torch').cuda.is_available()", reason="here torch sees a device")
def test_gpus_that_torch_does_not_see_are_not_replaced_by_hosts(tmp_path: Path) -> None:
    """nvidia-smi lists them, and nothing is wrong with the driver that it names."""
    nodes = {node: path_with(tmp_path, node, "580.95.05") for node in ("n1", "n2")}
    status, _, said = looks(tmp_path, 2, "run.device=cuda", **nodes)
    assert status == 75
    assert (
        "sees no CUDA device; the NVIDIA driver is 580.95.05, and torch, built for CUDA 13, needs "
        "580" in said
    )


def test_what_each_node_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks, the embedded engine's GPUs on the first node, and the servers'."""
    nvidia_smi(tmp_path, 2, used=40960)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert facts.gpus() == [
        Gpu(H100.name, 81559 / 1024, 561 / 1024),
        Gpu(H100.name, 81559 / 1024, 40.0),
    ]
    learner = {"tensor_parallel": 4, "data_parallel": 4}
    embedded = from_mapping(
        {"learner": learner, "sampler": {"devices": "8,9", "tensor_parallel": 2}}
    )
    assert check.needs(embedded, "2x16xH100-80", ["n1", "n2"], 2) == Needs({"n1": 10, "n2": 8}, 80)
    servers = from_mapping(
        {"learner": learner, "sampler": {"tensor_parallel": 2, "fleet": {"servers": 3}}}
    )
    assert check.needs(servers, None, ["n1", "n2", "n3", "n4"], 2).gpus == {
        "n1": 8,
        "n2": 8,
        "n3": 4,
        "n4": 4,
    }
    assert check.needs(from_mapping({"run": {"device": "cpu"}}), None, ["n1"], 1) == Needs()


def test_what_a_file_system_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    another = ("is another folder than on n1: it has to be shared", True)
    assert (
        facts.leave(tmp_path, "mark") is facts.folder_problem(tmp_path, "mark", "n2", "n1") is None
    )
    assert facts.arrived(tmp_path, "mark", "n2", "n1") is None
    assert facts.arrived(tmp_path, "mark", "n3", "n1") == another
    assert facts.folder_problem(tmp_path, "other", "n2", "n1") == another

    def stale(*_: object, **__: object) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    assert facts.leave(Path("/proc/nothing"), "mark")[1]
    monkeypatch.setattr(Path, "mkdir", stale)
    assert facts.leave(tmp_path, "again") == STALE
    monkeypatch.setattr(Path, "write_text", stale)
    assert facts.folder_problem(tmp_path, "mark", "n2", "n1") == STALE
