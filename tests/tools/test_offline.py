"""Bundle for a machine without network: pieces, stripped libraries, left_out.txt, experiments."""

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from preloaded import said

ROOT = Path(__file__).parents[2]
OFFLINE = ROOT / "tools" / "offline"
EXPERIMENTS = OFFLINE / "experiments"
sys.path += [str(OFFLINE), str(EXPERIMENTS)]

import pieces  # noqa: E402
import stage  # noqa: E402
import strip_fatbin  # noqa: E402
import trace_summary  # noqa: E402

# an interpreter that calls itself 3.12
PYTHON = f"""#!/bin/sh
case "$2" in *version_info*) exit 0 ;; esac
exec {sys.executable} "$@"
"""


@pytest.fixture
def bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Packages in three pieces, and beside them what unpack.sh needs."""
    contents = {
        "site/torch/lib/large.so": os.urandom(150_000) + bytes(3 << 20) + b"end",
        "site/torch/empty.py": b"",
        "site/nvidia/cu13/lib/libnccl.so": b"",
        "site/bin/ninja": b"",
        "project/megatron_rl/__init__.py": b'__version__ = "1.2"\n',
        "python": PYTHON.encode(),
        "offline/base/unpack.sh": (OFFLINE / "unpack.sh").read_bytes(),
        "offline/base/pieces.py": (OFFLINE / "pieces.py").read_bytes(),
    }
    for name, content in contents.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    for name in ("python", "site/bin/ninja"):
        (tmp_path / name).chmod(0o755)
    monkeypatch.setattr(pieces, "BLOCK", 2 << 20)
    out = tmp_path / "offline"
    pieces.pack(tmp_path / "site", out, mib=1, preset=1, jobs=2)
    (out / "index.json").rename(out / "base" / "index.json")
    packed = out / "base" / "project.tar.xz"
    subprocess.run(["tar", "-C", tmp_path / "project", "-cJf", packed, "."], check=True)
    return out


def unpack(bundle: Path, *arrived: Path) -> subprocess.CompletedProcess[str]:
    folder = bundle.parent
    env = {"PREFIX": f"{folder}/prefix", "PYTHON": f"{folder}/python", "PATH": "/usr/bin:/bin"}
    command = ["bash", bundle / "base" / "unpack.sh", *arrived]
    return subprocess.run(command, env=env, capture_output=True, text=True)


def test_what_was_packed_is_installed(bundle: Path) -> None:
    """Pieces that arrive one by one, in any order, and those that lie beside the script."""
    assert unpack(bundle, bundle / "p01").returncode == 0
    (bundle / "p01").unlink()
    done = unpack(bundle)
    assert done.returncode == 0, done.stderr
    prefix = bundle.parent / "prefix"
    site = prefix / "env/lib/python3.12/site-packages"
    large = site / "torch/lib/large.so"
    assert large.read_bytes() == (bundle.parent / "site/torch/lib/large.so").read_bytes()
    assert large.stat().st_blocks * 512 < 2 << 20, "zeros are a hole"
    assert (site / "torch/empty.py").read_bytes() == b""
    assert os.access(prefix / "env/bin/ninja", os.X_OK)
    assert (prefix / "env.sh").is_file()
    assert (site / "megatron_rl-1.2.dist-info/METADATA").is_file()


@pytest.mark.parametrize("damage", ["missing", "cut", "changed"])
def test_an_incomplete_piece_is_named(bundle: Path, damage: str) -> None:
    piece = bundle / "p01"
    content = piece.read_bytes()
    if damage == "missing":
        piece.unlink()
    else:
        piece.write_bytes(content[:-40] + b"changed" * (damage == "changed"))
    done = unpack(bundle)
    assert done.returncode == 2
    assert "unpack: piece p01 " in done.stderr
    assert "Traceback" not in done.stderr
    piece.write_bytes(content)
    assert unpack(bundle).returncode == 0, "transferred again"


def library(path: Path, *codes: tuple[int, int, int, bytes]) -> Path:
    """An ELF file with one fat binary (kind, architecture, flags, code) and a symbol table."""
    entries = b""
    for kind, arch, flags, code in codes:
        entries += (
            struct.pack(
                "<HHIQ12xI8xQ16x",
                kind,
                0x101,
                64,
                len(code),
                arch,
                flags,
            )
            + code
        )
    fatbin = strip_fatbin.MAGIC + struct.pack("<Q", len(entries)) + entries
    names = b"\0.symtab\0"
    content = fatbin.ljust(8192, b"\0") + b"symbols!" + names
    header = struct.pack("<4s36xQ10xHHH", b"\x7fELF", 64 + len(content), 64, 2, 1)
    symbols = struct.pack("<IIQQQQ24x", 1, 2, 0, 0, 64 + 8192, 8)
    section_names = struct.pack(
        "<IIQQQQ24x",
        0,
        3,
        0,
        0,
        64 + 8200,
        len(names),
    )
    path.write_bytes(header + content + symbols + section_names)
    return path


def test_code_of_the_wanted_architecture_is_kept(tmp_path: Path) -> None:
    ptx = strip_fatbin.PTX
    elf = strip_fatbin.ELF
    variant = strip_fatbin.VARIANT_A
    codes = (
        (elf, 80, 0, b"for80"),
        (elf, 90, variant, b"for90a"),
        (ptx, 90, 0, b"text90"),
    )
    path = library(tmp_path / "a.so", *codes)
    size = path.stat().st_size
    assert strip_fatbin.strip(path, 90) == strip_fatbin.Bytes(kept=6, dropped=11, symbols=8)
    content = path.read_bytes()
    assert len(content) == size
    found = [text for text in (b"for90a", b"for80", b"text90", b"symbols!") if text in content]
    assert found == [b"for90a"]
    # where there is no machine code for it, the newest that a driver compiles
    path = library(
        tmp_path / "b.so",
        codes[0],
        (ptx, 70, 0, b"t70"),
        (ptx, 80, 0, b"t80"),
    )
    whole = path.read_bytes()
    assert strip_fatbin.strip(path, 90).kept == 3
    assert b"t80" in path.read_bytes()
    path.write_bytes(whole[:-100])
    with pytest.raises(strip_fatbin.BrokenFile, match=r"b\.so"):
        strip_fatbin.strip(path, 90)


def test_the_list_of_what_is_left_out() -> None:
    globs = stage.read_globs(OFFLINE / "left_out.txt")
    carried = ("modelopt/nvidia", "vllm/flashinfer.py", "bin/ninja", "tests")
    left_out = ("nvidia", "flashinfer-0.6.dist-info", "bin/numba", "a/b.a", "a/tests/data")
    found = [path for path in carried + left_out if stage.is_left_out(Path(path), globs)]
    assert found == [*left_out]


def test_a_trace_by_kind_of_kernel(tmp_path: Path) -> None:
    logits = {"External id": 1, "Input Dims": [[512, 3456]]}
    events = [
        {"cat": "cpu_op", "name": "aten::exp", "args": logits},
        {"cat": "kernel", "name": "nvjet_gemm<1>", "ts": 0, "dur": 30},
        {"cat": "kernel", "name": "elementwise", "ts": 40, "dur": 10, "args": logits},
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    lines = " ".join(trace_summary.summarize(path).split())
    assert "product 0.0 ms 60.0%" in lines
    assert "logits 0.0 ms 20.0%" in lines


def test_every_part_of_the_update_is_measured(tmp_path: Path) -> None:
    small = ("--device=cpu", "--tiny", "--rows=8", "--response=8", "--rounds=1")
    said("megatron", [EXPERIMENTS / "update.py", ROOT, tmp_path, *small])
    lines = [json.loads(line) for line in (tmp_path / "update.jsonl").read_text().splitlines()]
    assert [line for line in lines if "error" in line] == []
    assert {"update", "body", "bare", "head", "trace"} <= {line["name"] for line in lines}
