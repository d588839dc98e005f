"""The report of `megatron-rl doctor`, in processes of their own: its size, secrets, problems."""

import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.metadata import version
from pathlib import Path

import pytest
from nvidia_smi import nvidia_smi

from megatron_rl.apps.nodes import doctor as module

ROOT = Path(__file__).parents[3]

# the deadline is for a machine that is not busy with tests
COMMAND = """
import sys
from megatron_rl import cli
from megatron_rl.apps.nodes import doctor
doctor.DEADLINE_S = 60.0
sys.exit(cli.main(["doctor"]))
"""


def report(folder: Path, packages: str = "", **environment: str) -> tuple[int, str]:
    """Status and report; programs of `folder` are found first, packages of `packages` too."""
    own = {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "PYTHONPATH": f"{packages}:{ROOT}",
        "HF_HOME": str(folder / "hub"),
        "HF_HUB_OFFLINE": "0",
        "NETRC": str(folder / "netrc"),
    }
    command = [sys.executable, "-c", COMMAND]
    done = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | own | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stderr == ""
    return done.returncode, done.stdout


class Hub(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/api/whoami-v2" else 404)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_a_machine_that_can_run(tmp_path: Path) -> None:
    """One screen, with a hub and Slurm, and without any secret."""
    (tmp_path / "sinfo").write_text("#!/bin/sh\necho slurm 24.05.1\n")
    (tmp_path / "sinfo").chmod(0o755)
    with HTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        status, text = report(
            tmp_path,
            HF_ENDPOINT=f"http://user:secret_1@127.0.0.1:{server.server_port}",
            HF_TOKEN="secret_2",
            WANDB_API_KEY="secret_3",
            MEGATRON_RL_FLEET_KEY="secret_4",
            SLURM_JOB_ID="77",
        )
        server.shutdown()
    assert status == 0, text
    assert len(text.splitlines()) <= 30
    assert "secret_" not in text
    assert "127.0.0.1: reachable, token accepted" in text
    assert f"run.root {tmp_path}/runs (not made yet): " in text
    assert "Hugging Face token set, W&B key set, MEGATRON_RL_FLEET_KEY set" in text
    assert "slurm 24.05.1, job 77" in text
    assert f"torch {version('torch')}" in text
    assert "PROBLEM" not in text


@pytest.mark.fault(
    "torch of another version, a driver too old for it, no hub",
    "doctor names the first two with the fix, status 1",
)
def test_what_would_prevent_a_run(tmp_path: Path) -> None:
    about = tmp_path / "packages" / "torch-9.9.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 9.9\n")
    nvidia_smi(tmp_path, 2, driver="470.82")
    status, text = report(tmp_path, str(about.parent), HF_ENDPOINT="http://127.0.0.1:9")
    problems = [line for line in text.splitlines() if "PROBLEM" in line]
    assert (status, len(problems)) == (1, 2), text
    assert "torch is ['9.9'], expected ==2.13.0; run `make EXTRA=cpu install`" in problems[0]
    assert "the NVIDIA driver is 470.82" in problems[1]
    assert "127.0.0.1: [Errno 111] Connection refused; only local" in text
    assert "Hugging Face token not set" in text


@pytest.mark.fault("nvidia-smi does not respond", "doctor reports the rest in time, and says so")
def test_a_driver_that_does_not_respond(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexec sleep 6\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(module, "DEADLINE_S", 4.0)
    monkeypatch.setattr(module, "LEAST_MIB", 1 << 40)
    text, can_run = module.doctor()
    assert not can_run
    assert "device    PROBLEM: no answer within 4 s" in text
    assert "MiB free, expected 1099511627776 in a folder that can be written" in text
    assert "MEGATRON_RL_FLEET_KEY" in text
