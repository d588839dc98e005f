"""`megatron-rl doctor`: versions, devices, disk, network and Slurm of this machine, to paste into an
issue, and problems that would prevent a run here. Of secrets it prints only whether they are set.
"""

import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from urllib.parse import urlsplit

from huggingface_hub import constants, get_token
from huggingface_hub.errors import HTTPError
from huggingface_hub.utils import build_hf_headers, get_session
from packaging.requirements import Requirement

from megatron_rl.config import ConfigError
from megatron_rl.config.fleet import KEY_VARIABLE
from megatron_rl.config.schema import Config
from megatron_rl.files import existing_folder, free_bytes
from megatron_rl.preflight.machine import detect, installed_gib
from megatron_rl.processes.instructions import about as products
from megatron_rl.processes.job import JOB
from megatron_rl.processes.process import free_port, own_cores, printable
from megatron_rl.processes.scratch import SHARED_MEMORY
from megatron_rl.tracking.status import environment
from megatron_rl.tracking.wandb_log import has_key

DEADLINE_S = 8.0  # of all sections: a driver or a file system may not respond
CONNECT_S = 4.0
LEAST_MIB = 64  # free on each disk; a container has no more shared memory by default
PROBLEM = "PROBLEM: "


def doctor() -> tuple[str, bool]:
    """Return the report, and whether a run can start here."""
    silent = f"no answer within {DEADLINE_S:g} s"
    found = {one: silent if one in OPTIONAL else PROBLEM + silent for one in SECTIONS}

    def look(section: Callable[[], str]) -> None:
        try:
            found[section] = section()
        except Exception as error:  # the report is for machines that are not as expected
            found[section] = f"{PROBLEM}{error}"

    # daemons: the process ends without those that wait for a driver or a file system
    threads = [threading.Thread(target=look, args=[one], daemon=True) for one in SECTIONS]
    for thread in threads:
        thread.start()
    end = time.monotonic() + DEADLINE_S
    for thread in threads:
        thread.join(max(0, end - time.monotonic()))
    lines = [
        f"{section.__name__:9} {printable(' '.join(text.split()))}"
        for section, text in found.items()
    ]
    can_run = not any(text.startswith(PROBLEM) for text in found.values())
    return "\n".join(lines), can_run


def system() -> str:
    about = environment()
    commit = "none"
    if git := about["git"]:
        commit = git["commit"] + " (modified)" * git["modified"]
    return f"{about['platform']}, Python {about['python']}, commit {commit}"


def packages() -> str:
    versions = environment()["versions"]
    shown = ", ".join(f"{name} {version}" for name, version in versions.items())
    extra = "gpu" if "vllm" in versions else "cpu"
    unmet = []
    for need in map(Requirement, metadata.requires("megatron-rl") or ()):
        if need.marker and not need.marker.evaluate({"extra": extra}):
            continue
        found = [one.version for one in metadata.distributions(name=need.name)][:1]
        if not [*need.specifier.filter(found, prereleases=True)]:
            unmet.append(f"{need.name} is {found or 'missing'}, expected {need.specifier}")
    if unmet:
        raise ConfigError(f"{'; '.join(unmet)}; run `make EXTRA={extra} install` ({shown})")
    return shown


def device() -> str:
    machine = detect()
    return f"{machine}, driver {machine.driver or 'none'}"


def cpu() -> str:
    kinds = products().get("products", {}).items()
    how = ", ".join(f"{format} {where}" for format, where in kinds)
    return f"{len(own_cores())} cores, {installed_gib():.0f} GiB, matrix products: {how}"


def disk() -> str:
    root = Path(Config().run.root).absolute()
    folders = {
        "run.root": existing_folder(root),
        "TMPDIR": Path(tempfile.gettempdir()),
        "sync.dir": SHARED_MEMORY,
    }
    shown = []
    for name, folder in folders.items():
        free = free_bytes(folder) >> 20
        place = str(folder)
        if name == "run.root" and folder != root:
            place = f"{root} (not made yet)"
        shown.append(f"{name} {place}: {free:,} MiB free")
        if free < LEAST_MIB or not os.access(folder, os.W_OK):
            raise ConfigError(
                f"{shown[-1]}, expected {LEAST_MIB} in a folder that can be written; free space "
                f"there, or set {name} to another folder"
            )
    return ", ".join(shown)


def ports() -> str:
    return f"127.0.0.1 has free ones, such as {free_port()}"


def hub() -> str:
    if constants.HF_HUB_OFFLINE:
        return "not used (HF_HUB_OFFLINE is set)"
    name = urlsplit(constants.ENDPOINT).hostname  # without a password
    try:
        route = f"{constants.ENDPOINT}/api/whoami-v2"
        response = get_session().get(route, headers=build_hf_headers(), timeout=CONNECT_S)
        known = {200: ", token accepted", 401: ", token refused" * bool(get_token())}
        more = known.get(response.status_code, f", but with status {response.status_code}")
        return f"{name}: reachable{more}"
    except HTTPError as error:
        return f"{name}: {error}; only local models and data can be used"


def secrets() -> str:
    held = {
        "Hugging Face token": get_token(),
        "W&B key": has_key(),
        KEY_VARIABLE: os.environ.get(KEY_VARIABLE),
    }
    return ", ".join(f"{name} {'set' if value else 'not set'}" for name, value in held.items())


def slurm() -> str:
    if not shutil.which("sinfo"):
        return "not installed"
    ask = ["sinfo", "--version"]
    said = subprocess.run(ask, capture_output=True, text=True, timeout=CONNECT_S).stdout
    version = said.strip() or "installed, but not configured"
    return f"{version}, job {os.environ.get(JOB, 'none')}"


SECTIONS = (system, packages, device, cpu, disk, ports, hub, secrets, slurm)
OPTIONAL = (hub, slurm)  # a run does without
