"""From a Hugging Face folder to torch_dist and back, to the byte; Megatron loads and saves it."""

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from models import ROOT, config_of, content, done, fails, made, tensors_of
from simulated import assert_same_bits, random_hf

from megatron_rl.models.hf_folder import write_folder
from megatron_rl.models.layout import Layout
from megatron_rl.models.shape import ModelShape


def make(folder: Path, config: dict[str, Any]) -> Path:
    made(folder, config)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def round_trip(source: Path, folder: Path) -> Path:
    done("import", source, folder / "checkpoint")
    done("export", folder / "checkpoint", folder / "back")
    return folder / "back"


def test_round_trip(tmp_path: Path) -> None:
    for family, changes in {
        "llama": {},
        "qwen2": {"tie_word_embeddings": True},
        "qwen3_moe": {"mlp_only_layers": [0]},
        "mixtral": {},
    }.items():
        source = make(tmp_path / family / "hf", config_of(family, **changes))
        assert content(source) == content(round_trip(source, tmp_path / family))


def test_several_files_a_tied_copy_and_old_buffers(tmp_path: Path) -> None:
    config = config_of("qwen3", tie_word_embeddings=True)
    tensors = random_hf(ModelShape.from_hf(config), torch.bfloat16, 0)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.rand(4)
    source = tmp_path / "hf"
    write_folder(source, tensors, config, max_file_bytes=16_000)
    assert len(list(source.glob("*.safetensors"))) > 2
    assert content(source) == content(round_trip(source, tmp_path))


@pytest.mark.parametrize(
    "config", [config_of("qwen3", tie_word_embeddings=True), config_of("qwen3_moe")]
)
def test_megatron_loads_an_import_and_its_own_save_is_exported(
    config: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    from megatron_rl.learner.learner import Learner  # before megatron

    from megatron.core import dist_checkpointing  # isort: skip

    from megatron_rl.config.schema import Config
    from megatron_rl.models.model import Model

    source = make(tmp_path / "hf", config)
    done("import", source, tmp_path / "checkpoint")
    learner = Learner(Model.of(config, Layout()), Config())
    try:
        learner.init_random(3)
        loaded = dist_checkpointing.load(
            weights_of(learner.modules[0]), str(tmp_path / "checkpoint")
        )
        learner.modules[0].load_state_dict(loaded, strict=False)
        got = {name: tensor.detach().clone() for name, tensor in learner.named_parameters()}
        for folder in (source, tmp_path / "checkpoint"):
            learner.init_random(4)
            learner.load_hf(folder)
            assert_same_bits(list(learner.named_parameters()), got)
        (tmp_path / "saved").mkdir()
        dist_checkpointing.save(weights_of(learner.modules[0]), str(tmp_path / "saved"))
    finally:
        learner.close()
    assert "--hf" in fails(capsys, "export", tmp_path / "saved", tmp_path / "out")
    done("export", tmp_path / "saved", tmp_path / "out", "--hf", source)
    assert_same_bits(list(tensors_of(tmp_path / "out").items()), tensors_of(source))
    assert (tmp_path / "out" / "tokenizer.json").is_file()


def weights_of(module: torch.nn.Module) -> dict[str, Any]:
    """A learner's weights, without the layers' (empty, pickled) extra states."""
    return {
        key: value
        for key, value in module.sharded_state_dict().items()
        if "_extra_state" not in key
    }  # type: ignore[operator]


def test_links_within_the_folder_and_into_the_hubs_cache(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = make(tmp_path / "made", config_of("llama"))
    snapshot = tmp_path / "models--a--b" / "snapshots" / "1234"
    blobs = tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for file in made.iterdir():
        file.rename(blobs / file.name)
        (snapshot / file.name).symlink_to(Path("..", "..", "blobs", file.name))
    (snapshot / "also.json").symlink_to("config.json")
    (tmp_path / "short").symlink_to(snapshot)
    assert content(snapshot) == content(round_trip(tmp_path / "short", tmp_path))


@pytest.mark.fault(
    "the checkpoint of a stranger holds links, or headers that lie",
    "export refuses it, writes nothing",
)
def test_an_export_of_what_a_stranger_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = make(tmp_path / "hf", config_of("llama"))
    checkpoint = tmp_path / "checkpoint"
    done("import", source, checkpoint)
    header = checkpoint / "hf" / "headers" / "model.safetensors.header"
    whole = header.read_bytes()
    lies = {
        b"": "header",
        b'{"a": {"dtype": "U8", "shape": [9], "data_offsets": [0, 9]}}': "would lack",
        whole.replace(b'"data_offsets":[0,', b'"data_offsets":[1,', 1): "bytes",
        whole.replace(b"BF16", b"F16", 1): "torch.float16",
    }
    for lie, word in lies.items():
        header.write_bytes(lie)
        assert word in fails(capsys, "export", checkpoint, tmp_path / "out")
    header.write_bytes(whole)
    (tmp_path / "secret").write_text("secret")
    link = checkpoint / "hf" / "notes.txt"
    link.symlink_to(tmp_path / "secret")
    assert "notes.txt is a link" in fails(capsys, "export", checkpoint, tmp_path / "out")
    link.unlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "hf", "secret"]
    done("export", checkpoint, tmp_path / "out")
    assert content(source) == content(tmp_path / "out")


@pytest.mark.fault(
    "Ctrl-C as soon as the converter starts", "one line, exit status 130, nothing under the name"
)
def test_an_early_interrupt(tmp_path: Path) -> None:
    source = make(tmp_path / "hf", config_of("llama"))
    command = [sys.executable, ROOT / "tools" / "convert.py", "import", source, tmp_path / "out"]
    running = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        while "torch" not in Path(f"/proc/{running.pid}/maps").read_text():
            time.sleep(0.01)
        running.send_signal(signal.SIGINT)
        _, said = running.communicate(timeout=120)
    finally:
        running.kill()
    assert running.returncode == 130
    assert said.startswith("error: interrupted by SIGINT")
    assert "Traceback" not in said
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_help_comes_at_once() -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "convert.py", "--help"],
        cwd=ROOT / "tools",
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert "import" in done.stdout
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert not imported & {"torch", "megatron", "transformers", "numpy"}
