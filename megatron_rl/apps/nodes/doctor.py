"""`megatron-rl doctor`: versions, devices, disk, network and Slurm of this machine, to paste into an
issue, and problems that would prevent a run here. Of secrets it prints only whether they are set.
"""

import importlib.metadata
import os
import shutil
import socket
import subprocess
import tempfile
import textwrap
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from packaging.requirements import Requirement

from megatron_rl.config import ConfigError
from megatron_rl.config.fleet import KEY_VARIABLE
from megatron_rl.config.schema import Config
from megatron_rl.preflight.machine import detect, installed_gib
from megatron_rl.processes import gpu_driver, instructions
from megatron_rl.processes.job import JOB
from megatron_rl.processes.process import own_cores, printable
from megatron_rl.processes.scratch import SHARED_MEMORY
from megatron_rl.tracking.status import environment
from megatron_rl.tracking.wandb_log import has_key

DEADLINE_S = 8.0  # of all sections: a driver or a file system may not respond
CONNECT_S = 4.0
WIDTH = 100  # columns
LEAST_GIB = 1.0  # free on a disk; checkpoints of the toy take less
SERVE_PORT = 8000  # the default of `megatron-rl serve`


class Finding(NamedTuple):
    text: str
    problems: tuple[str, ...] = ()


def doctor() -> tuple[str, bool]:
    """Return the report, and whether a run can start here."""
    found: dict[str, Finding] = {}

    def look(name: str, section: Callable[[], Finding]) -> None:
        try:
            found[name] = section()
        except Exception as error:  # the report is for machines that are not as expected
            found[name] = Finding(f"not known: {type(error).__name__}: {error}")

    # daemons: the process ends without those that wait for a driver or a file system
    threads = [threading.Thread(target=look, args=one, daemon=True) for one in SECTIONS.items()]
    for thread in threads:
        thread.start()
    end = time.monotonic() + DEADLINE_S
    for thread in threads:
        thread.join(max(0, end - time.monotonic()))
    silent = f"no answer within {DEADLINE_S:g} s"
    report = {name: found.get(name, Finding(silent, SILENT.get(name, ()))) for name in SECTIONS}
    problems = [problem for finding in report.values() for problem in finding.problems]
    lines = [_line(name, finding.text) for name, finding in report.items()]
    lines += [_line("PROBLEM", problem) for problem in problems]
    if not problems:
        lines.append(_line("result", "no problem found that would prevent a run here"))
    return "\n".join(lines), not problems


def _line(name: str, text: str) -> str:
    indent = " " * 10
    return textwrap.fill(
        printable(" ".join(text.split())),
        WIDTH,
        initial_indent=name.ljust(len(indent)),
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _system() -> Finding:
    about = environment()
    code = "not in a repository"
    if git := about["git"]:
        code = git["commit"] + " (modified)" * git["modified"]
    return Finding(f"{about['platform']}, Python {about['python']}, commit {code}")


def _packages() -> Finding:
    versions = environment()["versions"]
    text = ", ".join(f"{name} {version}" for name, version in versions.items())
    sets = {name: _unmet(name) for name in ("cpu", "gpu")}
    best = min(sets, key=lambda name: len(sets[name]))
    if not sets[best]:
        return Finding(text)
    unmet = "; ".join(sets[best])
    return Finding(
        text,
        (f"packages: {unmet}. Install them with `make EXTRA={best} install`",),
    )


def _unmet(extra: str) -> list[str]:
    """Requirements of megatron-rl, with this set of engines, that are not installed."""
    found = []
    with suppress(importlib.metadata.PackageNotFoundError):  # imported from a source tree
        for text in importlib.metadata.requires("megatron-rl") or ():
            need = Requirement(text)
            if need.marker and not need.marker.evaluate({"extra": extra}):
                continue
            try:
                version = importlib.metadata.version(need.name)
            except importlib.metadata.PackageNotFoundError:
                found.append(f"{need.name} is not installed")
                continue
            if not need.specifier.contains(version, prereleases=True):
                found.append(f"{need.name} is {version}, expected {need.specifier}")
    return found


def _gpu() -> Finding:
    rows = gpu_driver.ask("name", "memory.total", "driver_version")
    kinds = Counter(f"{name}, {memory} MiB, driver {driver}" for name, memory, driver in rows)
    text = "; ".join(f"{count} x {kind}" for kind, count in kinds.items())
    if (named := os.environ.get(gpu_driver.VISIBLE)) is not None:
        text += f" ({gpu_driver.VISIBLE}={named})"
    text = text or "nvidia-smi lists none"
    try:
        with suppress(importlib.metadata.PackageNotFoundError):  # torch: see packages
            return Finding(f"{text}; a run uses: {detect()}")
    except ConfigError as error:
        return Finding(text, (str(error),))
    return Finding(text)


def _cpu() -> Finding:
    products = instructions.about().get("products", {})
    how = "".join(f"; {kind} products {by}" for kind, by in products.items())
    return Finding(f"{len(own_cores())} cores, {installed_gib():.0f} GiB{how}")


def _disk() -> Finding:
    root = Path(Config().run.root).absolute()
    folders = {
        "run.root": next(path for path in (root, *root.parents) if path.is_dir()),
        "TMPDIR": Path(tempfile.gettempdir()),
    }
    texts = []
    problems = []
    for name, folder in folders.items():
        free = shutil.disk_usage(folder).free / (1 << 30)
        texts.append(f"{name} {folder}: {free:.1f} GiB free")
        if not os.access(folder, os.W_OK | os.X_OK):
            problems.append(f"{name}: {folder} cannot be written; set {name} to another folder")
        elif free < LEAST_GIB:
            problems.append(
                f"{name}: {folder} has {free:.1f} GiB free, expected {LEAST_GIB:g} or more; free "
                f"space there, or set {name} to another folder"
            )
    if SHARED_MEMORY.is_dir():
        free = shutil.disk_usage(SHARED_MEMORY).free / (1 << 30)
        texts.append(f"{SHARED_MEMORY}: {free:.1f} GiB free")
    return Finding("; ".join(texts), tuple(problems))


def _ports() -> Finding:
    try:
        socket.create_server(("127.0.0.1", 0)).close()
    except OSError as error:
        problem = f"ports: 127.0.0.1 accepts no listener: {error.strerror}; bring up `lo`"
        return Finding("none on 127.0.0.1", (problem,))
    try:
        socket.create_server(("127.0.0.1", SERVE_PORT)).close()
    except OSError as error:
        return Finding(
            f"free ones on 127.0.0.1; {SERVE_PORT} (megatron-rl serve): {error.strerror}"
        )
    return Finding(f"free ones on 127.0.0.1, {SERVE_PORT} (megatron-rl serve) too")


def _hub() -> Finding:
    from huggingface_hub import constants

    address = urlsplit(constants.ENDPOINT)
    name = address.netloc.rpartition("@")[2]
    if constants.HF_HUB_OFFLINE:
        return Finding(f"{name}: not used (HF_HUB_OFFLINE is set)")
    request = urllib.request.Request(address._replace(netloc=name).geturl(), method="HEAD")
    begun = time.monotonic()
    try:
        with urllib.request.urlopen(request, timeout=CONNECT_S):
            pass
    except urllib.error.HTTPError as error:
        return Finding(f"{name}: reachable, responds with status {error.code}")
    except OSError as error:
        why = getattr(error, "reason", error)
        return Finding(f"{name}: not reachable ({why}); models and data must be local")
    return Finding(f"{name}: reachable in {time.monotonic() - begun:.1f} s")


def _secrets() -> Finding:
    from huggingface_hub import get_token

    held = {
        "Hugging Face token": bool(get_token()),
        "W&B key": has_key(),
        KEY_VARIABLE: bool(os.environ.get(KEY_VARIABLE)),
    }
    return Finding(", ".join(f"{name} {'' if one else 'not '}set" for name, one in held.items()))


def _slurm() -> Finding:
    try:
        text = subprocess.run(
            ["sinfo", "--version"], capture_output=True, text=True, timeout=CONNECT_S, check=True
        ).stdout
    except FileNotFoundError:
        return Finding("not installed")
    if job := os.environ.get(JOB):
        text = f"{text.strip()}, job {job}"
    return Finding(text)


SECTIONS: dict[str, Callable[[], Finding]] = {
    "system": _system,
    "packages": _packages,
    "GPU": _gpu,
    "CPU": _cpu,
    "disk": _disk,
    "ports": _ports,
    "hub": _hub,
    "secrets": _secrets,
    "Slurm": _slurm,
}
# a run would wait for them too
SILENT = {
    "GPU": ("GPU: nvidia-smi does not respond; run `dmesg`, and reset the GPU or the node",),
    "disk": ("disk: a folder does not respond; see `df`, and set run.root or TMPDIR to another",),
}
