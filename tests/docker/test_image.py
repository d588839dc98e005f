"""The image: Dockerfile and Apptainer definition agree, and their scripts run in an empty root."""

import json
import os
import re
import shlex
import shutil
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "docker" / "Dockerfile").read_text()
DEFINITION = (ROOT / "docker" / "megatron-rl.def").read_text()
HOME = "/opt/megatron-rl"  # of the project in the image
NAMESPACES = ("unshare", "--mount", "--pid", "--fork", "--kill-child")
CERTIFICATES = "/certificates.crt"
SETTINGS = ("PIP_", "UV_", "SSL_", "http_proxy", "https_proxy")  # of package indexes


def instructions() -> Iterator[tuple[str, str]]:
    text = re.sub(r"^#.*\n", "", DOCKERFILE, flags=re.M).replace("\\\n", " ")
    for line in filter(None, text.splitlines()):
        name, _, rest = line.partition(" ")
        yield name, rest.strip()


def values(name: str) -> list[str]:
    return [rest for found, rest in instructions() if found == name]


def section(name: str) -> list[str]:
    (text,) = re.findall(rf"^%{name}\n((?: .*\n)*)", DEFINITION, re.M)
    return [line.strip() for line in text.splitlines()]


def test_the_definition_has_the_files_and_scripts_of_the_dockerfile() -> None:
    last_stage = DOCKERFILE[DOCKERFILE.rindex("\nFROM ") :]
    copied = re.findall(r"^COPY (?!--from)(.*) \S+$", last_stage, re.M)
    assert [line.split()[0] for line in section("files")] == shlex.split(" ".join(copied))
    scripts = [line.replace('"$EXTRA"', "gpu") for line in values("RUN")]
    assert section("post") == [
        line if line.startswith("/") else f"{HOME}/{line}" for line in scripts
    ]
    assert f"ARG BASE={re.findall('^From: (.*)', DEFINITION, re.M)[0]}\n" in DOCKERFILE


def test_the_image_has_the_cuda_of_the_pins() -> None:
    pins = (ROOT / "constraints" / "gpu.txt").read_text()
    (image,) = re.findall(r"^ARG BASE=nvidia/cuda:(\d+\.\d+)\.\d+-", DOCKERFILE, re.M)
    assert f"\nnvidia-cuda-runtime=={image}." in pins


class Machine:
    """An empty Ubuntu or Debian, with the package indexes of this machine."""

    def __init__(self, root: Path) -> None:
        self.root = root
        release = Path("/etc/os-release").read_text()
        if "ID=ubuntu" in release:
            suite = ["--components=main,universe", "noble"]
        else:
            suite = ["bookworm"]
        made = subprocess.run(
            [*NAMESPACES, "debootstrap", "--variant=minbase", *suite, str(root)],
            capture_output=True,
            text=True,
        )
        if made.returncode:
            pytest.skip(f"debootstrap: {made.stdout[-300:]}{made.stderr[-300:]}")
        self.env = {key: value for key, value in os.environ.items() if key.startswith(SETTINGS)}
        certificates = ssl.get_default_verify_paths().cafile
        if certificates:  # not where the package ca-certificates writes its own
            self.copy(Path(certificates), CERTIFICATES)
            self.env |= {"PIP_CERT": CERTIFICATES, "SSL_CERT_FILE": CERTIFICATES}
        self.wheels = [
            folder for folder in self.env.get("PIP_FIND_LINKS", "").split() if Path(folder).is_dir()
        ]

    def copy(self, source: Path, target: str) -> None:
        place = self.root / target.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, place, symlinks=True, ignore=ignored, dirs_exist_ok=True)
        else:
            shutil.copy(source, place)

    def run(self, command: str, user: str = "0", **env: str) -> str:
        mounts = [f"mount -t proc proc {self.root}/proc"]
        for folder in self.wheels:
            place = self.root / folder.lstrip("/")
            place.mkdir(parents=True, exist_ok=True)
            mounts.append(f"mount --bind {folder} {place}")
        settings = [f"{name}={value}" for name, value in env.items()]
        inside = shlex.join(
            ["chroot", f"--userspec={user}", str(self.root), "env", *settings, "sh", "-c", command]
        )
        done = subprocess.run(
            [*NAMESPACES, "sh", "-ec", "\n".join([*mounts, f"exec {inside}"])],
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", **self.env},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, command + done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("debootstrap"), reason="needs root and debootstrap"
)
def test_the_dockerfile_installs_the_cpu_set_in_an_empty_root(tmp_path: Path) -> None:
    machine = Machine(tmp_path / "root")
    folder = "/"
    env: dict[str, Any] = {"EXTRA": "cpu"}
    for name, rest in instructions():
        words = shlex.split(rest)
        if name == "WORKDIR":
            folder = rest
        elif name == "COPY" and not rest.startswith("--from"):
            *sources, target = words
            for source in sources:
                inner = Path(source).name if target.endswith("/") else ""
                machine.copy(ROOT / source, os.path.join(folder, target, inner))
        elif name == "RUN":
            machine.run(f"cd {folder} && {rest}", **env)
    (user,) = values("USER")
    (entrypoint,) = map(json.loads, values("ENTRYPOINT"))
    settings = dict(word.split("=", 1) for word in shlex.split(values("ENV")[0]))
    path = settings["PATH"].replace("$PATH", "/usr/bin:/bin")
    command = f"{shlex.join(entrypoint)} train recipes/dapo_int8.yaml --dry-run --on 1x8xH100-80"
    said = machine.run(
        f"cd {folder} && mkdir data $HF_HOME/hub && touch runs/written && {command}",
        user,
        PATH=path,
        HOME="/home/megatron",
        HF_HOME=settings["HF_HOME"],
    )
    assert "H100" in said
    assert (machine.root / "runs" / "written").exists()
    assert not (machine.root / "root" / ".cache" / "uv").exists()
