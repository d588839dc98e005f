"""Commands with a model named by hub id, against a hub on loopback: dry runs, `fetch`, what is
refused before weights move, commits of resumed runs; a run from the id alone.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import Command, refusal
from hub_server import Fault, HubServer, hub_server, use, write_weights

from megatron_rl import cli
from megatron_rl.config import load
from megatron_rl.config.plain_yaml import read_yaml
from megatron_rl.data.toy import write_toy
from megatron_rl.preflight import downloads

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "grpo-qwen3_0.6b-1n1g-int8.yaml"
NAME = "org/tiny"
TINY = ("cluster=cpu", f"model.path={NAME}", "model.init=pretrained", "run.name=tiny")
QUIET = ("quantization=none", "checkpoint.export_hf=false")


@pytest.fixture
def server(empty: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A hub with the toy's model, in shards; the toy's data is here, its model is not."""
    write_toy(empty / "data" / "tiny")
    model = empty / "data" / "tiny" / "model"
    write_weights(model, max_file_bytes=200_000)
    with hub_server() as server:
        server.commit = server.add(NAME, model)
        shutil.rmtree(model)
        use(server, empty / "home", monkeypatch)
        yield server


def weights_moved(server: HubServer) -> bool:
    return any("/cdn/" in line for line in server.requests)


def test_a_dry_run_names_what_a_start_downloads(server: HubServer, command: Command) -> None:
    said = command.dry_run(*TINY, recipe=RECIPE)
    assert f"fetch      {NAME}@{server.commit} (model.path): config, tokenizer and .safe" in said
    assert "4 files to download, 0.6 MB" in said
    assert "9744 prompts" in said  # by the tokenizer of the hub
    assert not weights_moved(server)


def test_without_the_hub_a_dry_run_plans_from_the_card(
    server: HubServer, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    server.close()
    said = command.dry_run("--on", "own", recipe=RECIPE)
    assert (
        "fetch      Qwen/Qwen3-0.6B (model.path): config, tokenizer and .safetensors; siz" in said
    )
    assert "model      Qwen/Qwen3-0.6B, 596.05M parameters" in said
    small = ("cluster=cpu", "model.path=Qwen/Qwen3-0.6B", "rollout.max_prompt_tokens=9")
    capsys.readouterr()
    assert cli.main(["train", str(RECIPE), "--dry-run", *small]) == 1
    said = capsys.readouterr().out
    assert "the data is not checked" in said
    assert said.endswith("the data was not checked: see the last note\n")
    assert "complete files are kept" not in said
    said = command("train", RECIPE, "--dry-run", *TINY, status=2)
    assert "error: model.path: org/tiny was not received" in said


def test_fetch_prints_sizes_and_completes_what_was_begun(
    server: HubServer, command: Command
) -> None:
    server.faults.append(Fault("GET /cdn/", 99, status=503))
    said = command("fetch", RECIPE, *TINY, status=2)
    assert said.count("error:") == 1
    assert "status 503" in said
    server.faults.clear()
    said = command("fetch", RECIPE, *TINY)
    assert "files to download" in said
    assert f"{NAME}@{server.commit} (model.path): complete" in said
    server.close()
    assert "files to download" not in command("fetch", RECIPE, *TINY)
    # the ranks of srun find it without the hub, and an incomplete one is refused
    config = downloads.from_cache(load(RECIPE, TINY))
    assert config.model.path == f"{NAME}@{server.commit}"
    said = refusal(downloads.from_cache, load(RECIPE, [*TINY, "model.path=org/other"]))
    assert "model.path: org/other is not complete in the cache" in said
    assert "`megatron-rl fetch RECIPE`" in said


def test_weights_that_do_not_fit_are_refused(server: HubServer, command: Command) -> None:
    files = dict(server.repositories["model", NAME].commits[server.commit])
    pickled = {name: content for name, content in files.items() if "safetensors" not in name}
    server.add("org/pickled", pickled | {"pytorch_model.bin": b"pickle"})
    said = command("fetch", RECIPE, *TINY, "model.path=org/pickled", status=2)
    assert "has no .safetensors; weights in pickle files (.bin) are not read" in said
    # the pointer of Git LFS that was committed in the place of the weights
    shard = next(one for one in files if one.endswith(".safetensors"))
    server.add("org/pointer", files | {shard: b"version https://git-lfs.github.com/spec/v1\n"})
    said = command("fetch", RECIPE, *TINY, "model.path=org/pointer", status=2)
    assert f"{shard} is not a safetensors file or is cut off (43 bytes)" in said
    # a shard that the index names and the repository lacks
    server.add("org/lacks", {one: files[one] for one in files if one != shard})
    said = command("fetch", RECIPE, *TINY, "model.path=org/lacks", status=2)
    assert f"names {shard}, which is not there" in said


def test_a_wrong_recipe_is_refused_before_weights_move(server: HubServer, command: Command) -> None:
    said = command("train", RECIPE, *TINY, "rollout.prompts_per_step=99999", status=2)
    assert "rollout.prompts_per_step" in said
    assert not weights_moved(server)


def test_too_little_space_is_reported_first(
    server: HubServer, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_rl.preflight.downloads.free_bytes", lambda path: 1000)
    said = command("fetch", RECIPE, *TINY, status=2)
    assert "but " in said and "has 1000 left; free space, or set HF_HOME" in said
    assert not weights_moved(server)


def test_a_resumed_run_keeps_its_commit(server: HubServer, empty: Path) -> None:
    begun = downloads.with_small_files(load(RECIPE, TINY))
    folder = empty / "runs" / "tiny"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(f"model: {{path: {begun.model.path}}}\n")
    later = server.add(NAME, {"config.json": b"{}"})
    assert downloads.with_small_files(load(RECIPE, TINY)).model.path == f"{NAME}@{later}"
    resumed = load(RECIPE, [*TINY, "run.if_exists=resume"])
    assert downloads.with_small_files(resumed).model.path == f"{NAME}@{server.commit}"
    named = load(RECIPE, [*TINY, "run.if_exists=resume", f"model.path={NAME}@main"])
    assert downloads.with_small_files(named).model.path == f"{NAME}@{later}"


def test_a_run_from_a_folder_resumes_with_it_under_a_preset_that_names_the_id(
    server: HubServer, empty: Path
) -> None:
    recorded = empty / "runs" / "tiny" / "config.yaml"
    recorded.parent.mkdir(parents=True)
    recorded.write_text("model: {path: models/tiny}\n")
    resumed = [*TINY, "run.if_exists=resume"]
    assert downloads.with_small_files(load(RECIPE, resumed)).model.path == "models/tiny"
    assert downloads.from_cache(load(RECIPE, resumed)).model.path == "models/tiny"
    named = load(RECIPE, [*resumed, f"model.path={NAME}@main"])
    assert downloads.with_small_files(named).model.path == f"{NAME}@{server.commit}"
    recorded.write_text("model: {path: models/other}\n")
    found = downloads.with_small_files(load(RECIPE, resumed)).model.path
    assert found == f"{NAME}@{server.commit}"


def test_toy_and_converter_take_ids(
    server: HubServer, command: Command, empty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command("toy", "data/alike", "--like", NAME)
    assert not weights_moved(server)
    made = json.loads((empty / "data" / "alike" / "model" / "config.json").read_text())
    assert made["model_type"] == "qwen3"
    from convert import main

    assert main(["import", NAME, str(empty / "imported")]) == 0
    assert main(["verify", NAME, str(empty / "imported")]) == 0


@pytest.mark.slow
@pytest.mark.engine
def test_a_run_starts_from_the_id_alone_and_resumes_without_the_hub(
    server: HubServer, empty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    def run(*words: str) -> str:
        line = [sys.executable, "-m", "megatron_rl.cli", *words]
        done = subprocess.run(line, capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run("train", str(RECIPE), *TINY, *QUIET)
    recorded = read_yaml((empty / "runs" / "tiny" / "config.yaml").read_text())
    assert recorded["model"]["path"] == f"{NAME}@{server.commit}"
    server.close()
    before = len(server.requests)
    said = run("train", str(RECIPE), *TINY, *QUIET, "run.steps=3", "run.if_exists=resume")
    assert "resumes after step 2" in said
    assert len(server.requests) == before
    assert "pass@" in run("eval", NAME, "--set", "data/tiny/test.jsonl", "eval.max_prompts=8")
