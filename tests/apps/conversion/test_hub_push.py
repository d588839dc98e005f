"""`megatron-rl push` with the real client, against a hub on loopback: what is uploaded, the card,
repositories that exist, and each refusal.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import Command
from hub_server import TOKEN, Fault, HubServer, hub_server, use
from huggingface_hub import ModelCard, constants
from models import config_of, made

from megatron_rl.config import from_mapping, to_yaml
from megatron_rl.models.hf_folder import HfFolder

NAME = "org/policy"
COMMIT = "0123456789" * 4
LINES = [
    {"progress/step": 1, "eval/accuracy": 0.25, "loss/entropy": 1.0},
    {"progress/step": 2, "eval/accuracy": 0.5, "rollout_corr/k3_kl": 1e-4},
    {"progress/step": 3, "rollout_corr/k3_kl": 2e-4},
]


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    with hub_server() as server:
        use(server, tmp_path / "home", monkeypatch)
        yield server


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A finished run, trained from a model and a data set of the hub."""
    run = tmp_path / "runs" / "mine"
    made(run / "model", config_of("qwen3"), file_bytes=50_000)
    (run / "model" / "README.md").write_text("the base model's card")
    (run / "model" / "parity.json").write_text("{}")
    about = {
        "model": {"path": f"org/base@{COMMIT}"},
        "data": {"train": {f"org/sums@{COMMIT}": 1.0, "mine.jsonl": 1.0}},
        "sampler": {"vllm": {"hf_token": "secret_1"}},
    }
    (run / "config.yaml").write_text(to_yaml(from_mapping(about)))
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in LINES))
    git = {"commit": "abc", "modified": True}
    (run / "env.json").write_text(json.dumps({"versions": {"megatron-rl": "1.2"}, "git": git}))
    return run


def test_a_model_is_uploaded_with_its_card(server: HubServer, run: Path, command: Command) -> None:
    """In one commit; a second push replaces the weight files of the first."""
    assert f"{server.url}/{NAME}/commit/" in command("push", run, NAME, "--private")
    there = server.files(NAME)
    local = {path.name: path.read_bytes() for path in (run / "model").iterdir()}
    assert local.pop("parity.json")
    assert there == local
    assert len([name for name in there if name.endswith(".safetensors")]) > 1
    assert server.repositories["model", NAME].private
    assert len(server.repositories["model", NAME].commits) == 2  # the empty one, and this

    text = there["README.md"].decode()
    data = ModelCard(text).data.to_dict()
    assert (data["base_model"], data["datasets"]) == ("org/base", ["org/sums"])
    assert {"megatron-rl", "reinforcement-learning", "ppo"} <= set(data["tags"])
    assert f"Base model: `org/base@{COMMIT}`" in text
    assert f"Training data: `org/sums@{COMMIT}`" in text
    assert "Training data: `mine.jsonl`" in text
    assert "megatron-rl 1.2, commit abc, modified" in text
    assert "| `eval/accuracy` | 0.5 | 2 |" in text
    assert "| `rollout_corr/k3_kl` | 0.0002 | 3 |" in text
    assert "loss/entropy" not in text
    assert f"  path: org/base@{COMMIT}\n" in text
    assert "secret_1" not in text
    assert TOKEN not in text

    shutil.rmtree(run / "model")
    made(run / "model", config_of("qwen3"), seed=1)
    assert "/commit/" in command("push", run, NAME)
    assert set(server.files(NAME)) == {"README.md", "config.json", "model.safetensors"}
    assert HfFolder(run / "model").files == ["model.safetensors"]
    assert server.repositories["model", NAME].private


def test_a_dry_run_writes_and_sends_nothing(
    server: HubServer, run: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    said = command("push", run, NAME, "--dry-run")
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
    assert server.requests == []
    assert "base_model: org/base" in said
    assert "\nmodel.safetensors.index.json\n" in said
    assert "parity.json" not in said


def test_what_cannot_be_pushed(
    server: HubServer, run: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is refused before the first request."""
    for name in ("policy", "org/a b", f"{NAME}@main"):
        assert "such as org/name" in command("push", run, name, status=2)
    with monkeypatch.context() as patch:
        patch.delenv("HF_TOKEN")
        assert "`hf auth login`, or set HF_TOKEN" in command("push", run, NAME, status=2)
    (run / "model" / "notes.json").symlink_to("/etc/hostname")
    assert "is a link out of its folder" in command("push", run, NAME, status=2)
    next((run / "model").glob("*.safetensors")).unlink()
    export = f"`python tools/convert.py export {run} {run}/model` writes it"
    assert export in command("push", run, NAME, status=2)
    shutil.rmtree(run / "model")
    assert export in command("push", run, NAME, status=2)
    assert server.requests == []


def test_a_public_repository_is_not_taken_for_a_private_one(
    server: HubServer, run: Path, command: Command
) -> None:
    server.add(NAME, {"README.md": b"of others"})
    assert "exists and is public" in command("push", run, NAME, "--private", status=2)
    assert server.files(NAME) == {"README.md": b"of others"}


FAULTS = {
    "token": (None, "status 401", "use a token that may write"),
    "namespace": (Fault("POST /api/repos", status=403), "status 403", "use a token that may write"),
    "create": (Fault("POST /api/repos", status=503), "status 503", "run the command again"),
    "commit": (
        Fault("POST .*/commit", times=9, status=403),
        "status 403",
        "use a token that may write",
    ),
    "large file": (
        Fault("PUT /cdn", times=99, status=403),
        "status 403",
        "use a token that may write",
    ),
}


@pytest.mark.fault("the hub refuses a push (401, 403, 503)", "one line with the way out, no commit")
@pytest.mark.parametrize("name", FAULTS)
def test_the_hub_refuses(
    name: str, server: HubServer, run: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault, status, hint = FAULTS[name]
    if fault is None:
        monkeypatch.setenv("HF_TOKEN", "hf_another")
    else:
        server.faults.append(fault)
    said = command("push", run, NAME, status=2)
    assert status in said
    assert hint in said
    assert "hf_another" not in said
    assert TOKEN not in said
    assert ("model", NAME) not in server.repositories or not server.files(NAME)


@pytest.mark.fault("the hub is overloaded for a moment (503)", "the client tries again")
def test_a_moment_of_503(server: HubServer, run: Path, command: Command) -> None:
    server.faults += [Fault("POST .*/preupload", status=503), Fault("PUT /cdn", status=503)]
    assert "/commit/" in command("push", run, NAME)
    assert server.files(NAME)


def test_a_hub_that_is_not_reachable(server: HubServer, run: Path, command: Command) -> None:
    server.close()
    said = command("push", run, NAME, status=2)
    assert "check the network and HF_ENDPOINT" in said
