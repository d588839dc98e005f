"""Conversions killed at random moments or on a full disk: their folder is complete or absent."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import struct
import sys
import time
from pathlib import Path
from subprocess import DEVNULL
from typing import IO, Any

import pytest
from helpers import hf_shapes
from models import config_of, content, convert, done, fails, made
from preloaded import Process

from megatron_rl.apps.conversion import exports
from megatron_rl.apps.conversion.work import partial_of
from megatron_rl.models.hf_folder import make_header
from megatron_rl.models.shape import ModelShape
from megatron_rl.models.tensors import TensorSpec

KILLS = 20
FILE_BYTES = 30_000


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dozens of files in each folder."""
    monkeypatch.setattr(exports, "FILE_BYTES", FILE_BYTES)


def asked(command: str, source: Path, target: Path) -> list[str]:
    return [
        command,
        str(source),
        str(target),
        *(["--format", "int8"] if command == "quantize" else []),
    ]


CONVERSION = f"""
import os, resource, signal, sys
sys.path.insert(0, {str(Path(convert.__file__).parent)!r})
import convert, torch
from megatron_rl.apps.conversion import exports
exports.FILE_BYTES = {FILE_BYTES}
torch.set_num_threads(1)
%s
sys.exit(convert.main(sys.argv[1:]))
"""
NO_SPACE = """
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
"""


def begun(words: list[str], before: str = "", said: IO[Any] | None = None) -> Process:
    """A conversion in its own process: a fork of this one, with its threads, might hang."""
    return Process(
        "torch",
        [sys.executable, "-c", CONVERSION % before, *words],
        stdout=DEVNULL,
        stderr=said or DEVNULL,
    )


@pytest.mark.fault(
    "kill -9 of a conversion at random moments", "begun again it ends with the same bytes"
)
@pytest.mark.parametrize("command", ["import", "quantize"])
def test_random_kills(tmp_path: Path, command: str, capfd: pytest.CaptureFixture[str]) -> None:
    rng = random.Random(command)
    source = made(tmp_path / "hf", config_of("qwen3_moe"), file_bytes=30_000)
    words, undisturbed = (
        asked(command, source, tmp_path / name) for name in ("out", "undisturbed")
    )
    # which may wait for imports
    assert begun(asked(command, source, tmp_path / "first")).wait() == 0
    started = time.perf_counter()
    assert begun(undisturbed).wait() == 0
    whole_s = time.perf_counter() - started
    before = content(source)
    killed = 0
    least = KILLS if command == "import" else KILLS // 2
    # the moments are of a duration that the next one need not have
    for attempt in range(10 * least):
        if attempt >= least and killed >= 3:
            break
        if (tmp_path / "out").exists():
            assert content(tmp_path / "out") == content(tmp_path / "undisturbed")
            (tmp_path / "out").rename(tmp_path / f"whole_{attempt}")
        process = begun(words)
        time.sleep(rng.uniform(0.1, 0.9) * whole_s)
        process.kill()
        killed += process.wait() == -signal.SIGKILL
    assert killed >= 3
    if not (tmp_path / "out").exists():
        done(*words)
    assert content(tmp_path / "out") == content(tmp_path / "undisturbed")
    assert content(source) == before
    assert not partial_of(tmp_path / "out").exists()


@pytest.mark.fault(
    "no space is left, or a file may not grow",
    "one line with file and reason; it succeeds with room",
)
def test_no_space_left(tmp_path: Path) -> None:
    """RLIMIT_FSIZE in place of a full disk."""
    source = made(tmp_path / "hf", config_of("llama"))
    target = tmp_path / "out"
    words = asked("import", source, target)

    with (tmp_path / "said").open("w") as said_to:
        assert begun(words, NO_SPACE, said_to).wait() == 1
    said = (tmp_path / "said").read_text()
    assert os.strerror(errno.EFBIG) in said
    assert "Traceback" not in said
    assert not target.exists()
    done(*words)


@pytest.mark.fault(
    "a disk whose room is known to be too little", "one line with need and have, at once"
)
def test_too_small_a_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The model's file is a hole, of twice the bytes that are free."""
    # 206 GB in each layer
    narrow = 1 << 15
    wide = 1 << 20
    layers = 1 + 2 * shutil.disk_usage(tmp_path).free // (2 * 3 * narrow * wide)
    sizes = {"hidden_size": narrow, "intermediate_size": wide, "vocab_size": wide}
    config = config_of("llama", **sizes) | {"num_hidden_layers": layers}
    source = tmp_path / "hf"
    specs = [
        TensorSpec(name, "bfloat16", size)
        for name, size in hf_shapes(ModelShape.from_hf(config)).items()
    ]
    header = make_header(specs)
    source.mkdir()
    (source / "config.json").write_text(json.dumps(config))
    try:
        with (source / "model.safetensors").open("wb") as file:
            file.write(struct.pack("<Q", len(header)) + header)
            file.truncate(8 + len(header) + sum(spec.nbytes for spec in specs))
    except OSError as error:
        pytest.skip(f"the file system has no file of that size: {error}")
    said = fails(capsys, *asked("import", source, tmp_path / "out"))
    assert os.strerror(errno.ENOSPC) in said
    assert said.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
