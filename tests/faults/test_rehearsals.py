"""Batch scripts on simulated nodes with interrupted jobs: each run ends like an undisturbed one.

`make rehearse`; a case takes two to four minutes on two cores.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import kills
import pytest
from box import ROOT, SMALL, Box, needs_slurm

from megatron_rl.checkpoint import checkpoints
from megatron_rl.data.toy import write_toy

pytestmark = [needs_slurm, pytest.mark.timeout(1500)]
END_S = 1200
STEPS = 6
RUN = (
    f"run.steps={STEPS}",
    "checkpoint.every=2",
    "checkpoint.export_hf=true",
    "model.init=random",
    "reward.name=chance:score",
    "reward.workers=1",
)
SLOW = 0.15


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Box]:
    write_toy(tmp_path / "data" / "toy")
    with Box(tmp_path, env={"PYTHONPATH": str(tmp_path)}) as box:
        box.reward()
        yield box


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The run of a format that nothing happens to, made once."""
    made: dict[str, Path] = {}

    def run(quantization: str) -> Path:
        if quantization not in made:
            folder = tmp_path_factory.mktemp(quantization)
            write_toy(folder / "data" / "toy")
            with Box(folder) as box:
                box.reward(0)
                status = box.train(
                    "model.path=data/toy/model", f"quantization={quantization}", *RUN
                ).wait(END_S)
            assert status == 0, box.screen
            made[quantization] = box.run
        return made[quantization]

    return run


def rehearse(
    box: Box, script: str, *settings: str, event: str = "", **environment: str
) -> tuple[int, str]:
    """Exit status, and what the rehearsal and its job said."""
    around = {"REHEARSE_NODES": "2", "REHEARSE_EVENT": event, **environment}
    job = box.rehearse(script, f"model.path={box.folder}/data/toy/model", *RUN, *settings, **around)
    try:
        status = job.wait(END_S)
    finally:
        job.terminate()
        job.wait(120)
    print(box.screen)
    return status, box.screen


EVENTS = {  # settings of the rehearsal, and the state of the first start
    "usr1": ({}, "stopped"),
    "rank": ({"REHEARSE_AFTER": "5"}, "failed"),
    "limit": ({"REHEARSE_SIGNAL_S": "100"}, "stopped"),
    "requeue": ({}, "stopped"),
    "daemon": ({}, None),
}
BY_SLURM = ("requeue", "daemon")


@pytest.mark.fault(
    "a job on two nodes is asked to stop, loses a rank or its node, reaches its time limit",
    "it is queued again from its checkpoint; as if left alone",
)
@pytest.mark.parametrize(
    ("event", "format"), [("usr1", "fp8"), *((event, "int8") for event in EVENTS)]
)
def test_a_job_is_queued_again(
    place: Box, undisturbed: Callable[[str], Path], event: str, format: str
) -> None:
    settings, before = EVENTS[event]
    if event in ("daemon", "limit"):
        place.reward(SLOW)
    status, said = rehearse(
        place, f"dapo_{format}", f"quantization={format}", event=event, **settings
    )
    assert status == 0, said
    assert event in BY_SLURM or "is queued again" in said
    _ended_as(place, undisturbed(format), before=before)


@pytest.mark.fault(
    "scancel of a running job", "what stands is saved; submitted again it goes on, as if left alone"
)
def test_scancel(place: Box, undisturbed: Callable[[str], Path]) -> None:
    status, said = rehearse(place, "dapo_int8", event="scancel")
    assert status != 0
    assert "ended as CANCELLED" in said
    assert "queued again" not in said
    assert place.status()["state"] == "stopped"
    assert max(checkpoints.steps(place.run / "checkpoints")) == place.status()["step"]
    place.left_nothing()
    status, said = rehearse(place, "dapo_int8")
    assert status == 0, said
    _ended_as(place, undisturbed("int8"), restarts=None, before="stopped")


@pytest.mark.fault(
    "a job of learner and servers is asked to stop",
    "it is queued again; every prompt is drawn once",
)
def test_usr1_beside_servers(place: Box) -> None:
    status, said = rehearse(place, "dapo_split", *_servers(place), event="usr1")
    assert status == 0, said
    assert "is queued again" in said
    _counted(place)
    assert place.status()["restarts"] == "1"


@pytest.mark.fault(
    "a server of a job dies, SIGKILL", "its node starts it again, and the run goes on"
)
def test_a_killed_server(place: Box) -> None:
    status, said = rehearse(place, "dapo_split", *_servers(place), event="server")
    assert status == 0, said
    assert "queued again" not in said
    _counted(place)


@pytest.mark.fault(
    "a node cannot write the run's folder",
    "it is named before models load, and left out on request",
)
def test_a_bad_node(place: Box) -> None:
    (place.folder / "runs").mkdir()
    bad = {"CLUSTER_READONLY": f"n2:{place.folder}/runs", "REHEARSE_SPARE": "1"}
    status, said = rehearse(place, "dapo_int8", "run.steps=1", **bad)
    named = f"node n2: run.root={place.folder}/runs cannot be written: Read-only file system"
    assert (status, said.count(named), "start 1" in said) == (1, 1, False), said
    assert "queued again" not in said
    status, said = rehearse(place, "dapo_int8", "run.steps=1", EXCLUDE_BAD_NODE="1", **bad)
    assert (status, said.count(named)) == (0, 1), said
    assert "it leaves out n2" in said
    assert "ranks on n1,n3" in said
    place.left_nothing()


COMPARE = """
source slurm/cluster.sh 1
python tools/compare_corrections.py "$@" || exit
for _ in $(seq 600); do [[ -z $(squeue -h) ]] && exit; sleep 2; done
exit 1
"""


@pytest.mark.fault(
    "corrections are compared under Slurm", "a job for each, and a last one that writes the report"
)
def test_a_comparison(place: Box) -> None:
    toy = place.folder / "data" / "toy"
    runs = place.folder / "runs"
    words = [
        "recipes/quickstart.yaml",
        "--corrections",
        "none",
        "tis",
        "--steps",
        "1",
        "--root",
        str(runs),
        "--slurm",
        "slurm/dapo_int8.sbatch",
        "--sbatch=--gres=none --cpus-per-task=1 --time=01:00:00",
        *SMALL,
        *RUN,
        f"model.path={toy}/model",
        f"data.train={toy}/train.jsonl",
        f"data.eval={toy}/test.jsonl",
        "cluster=1n8g",
        "run.device=cpu",
        "sampler.vllm.gpu_memory_utilization=0.3",
    ]
    own = {"PATH": f"{ROOT}/.venv/bin:{os.environ['PATH']}"}
    done = place.launch(
        ["bash", "-c", COMPARE, "compare", *words],
        cwd=ROOT,
        env=own,
    ).wait(END_S)
    assert done == 0, place.screen
    assert place.screen.count("job ") == 3
    page = (runs / "quickstart_corrections.html").read_text()
    assert "quickstart_corrections_none" in page
    assert "quickstart_corrections_tis" in page
    place.left_nothing()


def _servers(box: Box) -> list[str]:
    return ["sampler.dedicated_nodes=true", "sampler.engines=2", f"sync.dir={box.folder}/sync"]


def _ended_as(
    box: Box, undisturbed: Path, restarts: str | None = "1", before: str | None = None
) -> None:
    status = box.status()
    assert (status["state"], status.get("restarts") or None) == ("finished", restarts)
    assert before in (None, status["before"]["state"])
    assert not kills.differences(box.run, undisturbed)
    box.left_nothing()


def _counted(box: Box) -> None:
    assert box.status()["state"] == "finished"
    assert not kills.miscounted(box.run, STEPS)
    box.left_nothing()
