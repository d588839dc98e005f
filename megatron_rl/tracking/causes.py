"""Cause of a failed attempt: its exception, signal or hang, and the setting to change.

An exception of this project has its advice in `hint`, and in `process` the failed process if it is
another one. Others get advice from a table by type. A rank that fails writes its cause to
`rank_N.end.json` for the launcher, in the run's temporary folder or, where that is full or
read-only, beside the logs.
"""

import errno
import json
import re
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from megatron_rl.files import read_json
from megatron_rl.processes.process import describe_end, signal_name

LOST_PEER = "LostPeer"
HANG = "Hang"
# gloo raises a bare RuntimeError
LOST = re.compile(r"Connection (closed|reset) by peer|Broken pipe|another rank has ended")
NO_ADVICE = "The last lines of its log are all that is known."
RESUME = "run.if_exists=resume continues from the newest checkpoint."
MEMORY = (
    "The machine ran out of memory. Ask for more (in Slurm --mem, in a shell `ulimit -v`), or need "
    "less: lower learner.tokens_per_microbatch, rollout.prompts_per_step, reward.workers, and on "
    "CPUs sampler.vllm.kv_cache_memory_bytes."
)
DISK = (
    "Free space where the reason says, or use another place: run.root, sync.dir, TMPDIR. "
    "checkpoint.keep_last and log.record_every decide how much a run writes."
)
FILES = (
    "Raise the limit before the run starts (`ulimit -n 65536`), or lower reward.workers and "
    "sampler.engines."
)
DEVICE = (
    "Look for Xid in the machine's `dmesg` and leave the node out; NCCL_DEBUG=INFO names the link."
)
RENDEZVOUS = (
    "A rank has not started, or cannot reach the others: look for the first one that ended, and at "
    "MASTER_ADDR, GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME."
)
FOLLOWED = (
    "This process only followed another one: the logs beside its own, srun's lines or the "
    f"machine's `dmesg` say which was first. {RESUME}"
)
HANG_HINT = (
    "The end of its log has its stack. Where it was only slow, raise run.hang_timeout_s, "
    "sampler.start_timeout_s, sampler.request_timeout_s or reward.timeout_s."
)
CRASH = (
    "The end of its log may name the library. Kernels that do not suit the machine do this, and "
    "versions that do not belong together: constraints/ has those that were tested."
)
# the class, or one that it inherits from
BY_TYPE = {
    "OutOfMemoryError": "Lower learner.tokens_per_microbatch, set learner.recompute=full, or raise "
    "learner.tensor_parallel, or learner.context_parallel for long responses; if the engine "
    "shares the GPU, sampler.sleep=offload or less of sampler.vllm.gpu_memory_utilization.",
    "MemoryError": MEMORY,
    "DistStoreError": RENDEZVOUS,
    "DistNetworkError": RENDEZVOUS,
    "DistBackendError": DEVICE,
    "AcceleratorError": DEVICE,
}
BY_ERRNO = {
    errno.ENOSPC: DISK,
    errno.EDQUOT: DISK,
    errno.EMFILE: FILES,
    errno.ENFILE: FILES,
    errno.ENOMEM: MEMORY,
}
BY_SIGNAL: dict[int, str] = {
    signal.SIGKILL: f"SIGKILL comes from outside. From a person or a scheduler: {RESUME} From the "
    "kernel, when memory is short: `dmesg` says so.",
    signal.SIGBUS: "Shared memory is full: enlarge /dev/shm (a container has 64 MiB by default: "
    "--shm-size), or let updates travel elsewhere: sync.dir.",
    signal.SIGTERM: RESUME,
}


@dataclass(frozen=True)
class Cause:
    name: str  # of the exception's class, of the signal; or LostPeer, Hang, Gone
    process: str
    phase: str = ""
    log: str = ""
    advice: str = NO_ADVICE

    def as_fields(self) -> dict[str, str]:
        """The fields of status.json, where `class` is the name."""
        content = asdict(self)
        return {"class": content.pop("name"), **content}

    @classmethod
    def read(cls, found: Any) -> "Cause | None":
        """Read a cause from `as_fields`; None from anything else."""
        if not isinstance(found, Mapping) or "class" not in found:
            return None
        named = {**found, "name": found["class"]}
        return cls(*(str(named.get(one.name, "")) for one in fields(cls)))

    def paragraph(self) -> str:
        where = self.process
        if self.phase:
            where += f", in {self.phase}"
        log = f" Its log is {self.log}." if self.log else ""
        return f"why: {self.name}: {where}. {self.advice}{log}"


def of_error(error: BaseException, process: str, phase: str = "", log: str = "") -> Cause:
    """Return the cause of an exception of this process."""
    name = type(error).__name__
    advice = getattr(error, "hint", "") or _by_type(error)
    if not advice and (isinstance(error, ConnectionError) or LOST.search(str(error))):
        name = LOST_PEER
        advice = FOLLOWED
    process = getattr(error, "process", process)
    return Cause(name, process, phase, log, advice or NO_ADVICE)


def _by_type(error: BaseException) -> str:
    if isinstance(error, OSError) and error.errno in BY_ERRNO:
        return BY_ERRNO[error.errno]
    for kind in type(error).__mro__:
        if kind.__name__ in BY_TYPE:
            return BY_TYPE[kind.__name__]
    return ""


def of_exit(code: int, process: str, log: str, out_of_memory: bool = False) -> Cause:
    """Cause of a process that wrote none. `out_of_memory`: the kernel counted an OOM kill."""
    if code >= 0:
        return Cause(f"exit status {code}", process, log=log)
    advice = BY_SIGNAL.get(-code, CRASH)
    if out_of_memory and -code == signal.SIGKILL:
        advice = MEMORY
    return Cause(signal_name(-code), process, log=log, advice=advice)


def write_end(folders: Sequence[Path], rank: int, error: BaseException) -> None:
    """Write the cause of a rank's failure to the first folder that is writable."""
    cause = of_error(error, f"rank {rank}")
    content = {"reason": f"{type(error).__name__}: {error}", "cause": cause.as_fields()}
    for folder in folders:
        with suppress(OSError):  # its log has the traceback
            _end_of(folder, rank).write_text(json.dumps(content), encoding="utf-8")
            return


def read_end(
    folders: Sequence[Path], log: Path, rank: int, code: int, out_of_memory: bool
) -> tuple[str, Cause]:
    """Read why a rank has ended: its recorded cause, else its exit status."""
    for folder in folders if code > 0 else ():
        with suppress(OSError, ValueError):
            found = read_json(_end_of(folder, rank))
            if cause := Cause.read(found.get("cause")):
                return str(found["reason"]), replace(cause, log=str(log))
    return describe_end(code), of_exit(code, f"rank {rank}", str(log), out_of_memory)


def _end_of(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank}.end.json"
