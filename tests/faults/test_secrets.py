"""Keys of a whole run: in the environment of the launcher and of rank 0, and nowhere else."""

import os
import signal
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest
from box import PATIENCE_S, Box

pytestmark = pytest.mark.timeout(1200)
CANARY = "canary6f1e0"
NAMES = (
    "WANDB_API_KEY",
    "HF_TOKEN",
    "MEGATRON_RL_FLEET_KEY",
    "AWS_SECRET_ACCESS_KEY",
    "OPENAI_API_KEY",
    "DB_PASSWORD",
)
KEYS = {name: f"{CANARY}{number:x}".ljust(40, "0") for number, name in enumerate(NAMES)}


def holders(folder: Path) -> list[str]:
    """Files below a folder with a canary in them, as bytes or in a table's values."""
    found = []
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            text = str(pq.read_table(path).to_pylist()) if path.suffix == ".parquet" else ""
            if CANARY.encode() in path.read_bytes() or CANARY in text:
                found.append(str(path))
    return found


def exposed(process: psutil.Process) -> tuple[bool, set[str]]:
    """Return if the canary is in a process's arguments, and its environment keys with the canary."""
    return CANARY in " ".join(process.cmdline()), {
        name for name, value in process.environ().items() if value.startswith(CANARY)
    }


@pytest.mark.fault(
    "keys and passwords in the environment of a whole run",
    "no file, argument or other process holds them",
)
def test_keys_stay_where_they_are(box: Box) -> None:
    box.env |= KEYS
    box.env["WANDB_DIR"] = str(box.folder)
    settings = (
        "log.wandb=offline",
        "checkpoint.every=2",
        "sampler.engines=1",
        "sampler.formats=[int8]",
    )
    process = box.begin(*settings, recipe="quickstart_fleet.yaml")
    seen: dict[str, set[str]] = {}
    for one in {*box.processes(), *psutil.Process(process.pid).children(recursive=True)}:
        try:
            shown, keys = exposed(one)
        except psutil.NoSuchProcess:
            continue
        assert not shown, one.cmdline()
        words = one.cmdline()
        kind = (
            "rank " + one.environ()["RANK"] if "megatron_rl.rank" in words else " ".join(words[:4])
        )
        seen[kind] = seen.get(kind, set()) | keys
    assert seen.pop("rank 0") <= {"WANDB_API_KEY", "MEGATRON_RL_FLEET_KEY"}
    launcher = next(kind for kind in seen if "megatron_rl.cli" in kind)
    assert seen.pop(launcher) == set(KEYS)
    assert len(seen) >= 3  # another rank, an engine, a reward worker, what W&B starts
    assert {kind: keys for kind, keys in seen.items() if keys - {"WANDB_API_KEY"}} == {}
    print(seen)
    assert not holders(box.tmp)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(PATIENCE_S) == 0, box.screen
    assert (box.run / "report.html").exists()
    assert any(box.folder.rglob("*.wandb"))
    assert os.fspath(box.run / "env.json") in map(str, box.run.iterdir())
    assert holders(box.folder) == []
