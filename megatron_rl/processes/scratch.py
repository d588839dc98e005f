"""Private temporary folder (TMPDIR) of a run's processes, and paths removed with it: by its owner,
or by the next start if that was killed, never under a live run (`folder_lock.py`); shared memory
segments of an engine.
"""

import getpass
import os
import re
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

from megatron_rl.config import ConfigError
from megatron_rl.files import remove
from megatron_rl.processes.environment import compiled_code
from megatron_rl.processes.folder_lock import claim, current, is_abandoned

PREFIX = "megatron-rl-run-"
ELSEWHERE = "elsewhere"  # paths outside that are removed with the folder
SHARED_MEMORY = Path("/dev/shm")
PROCESSES = Path("/proc")
# Python's SharedMemory, vLLM's collectives on CPUs, and semaphores
SEGMENT = re.compile(rf"{SHARED_MEMORY}/((?:psm_|vllm_dist_|sem\.mp-)[^/\s]+)$", re.MULTILINE)
LONGEST = 107 - 37  # of a path in which vLLM can open sockets, whose names have 36 letters


class Scratch:
    """Temporary folder of this process and its children; `environment` has their variables."""

    def __init__(self) -> None:
        parent = Path(os.environ.get("TMPDIR", "/tmp"))
        try:
            parent = Path(tempfile.gettempdir())
            if len(str(parent)) + len(PREFIX) + 9 > LONGEST:
                parent = Path("/tmp")
            remove_stale(parent)
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))  # mode 0700
            self._lock = claim(self.path)
            _keep_headers(self.path)
        except OSError as error:
            raise ConfigError(
                f"the temporary folder {parent} cannot be used: {error}. Free space there, or set "
                "TMPDIR to another one"
            ) from None

    @property
    def environment(self) -> dict[str, str]:
        return {"TMPDIR": str(self.path)}

    def enter(self) -> None:
        """Use the folder in this process too."""
        os.environ.update(self.environment)
        tempfile.tempdir = None  # Python caches the previous one here

    def close(self) -> None:
        _remove(self.path)
        self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _keep_headers(folder: Path) -> None:
    """Keep torch's precompiled headers: they are always below TMPDIR, and building them takes
    seconds of each engine's start.
    """
    # no place to keep them, or no user name
    with suppress(OSError, KeyError, ConfigError):
        kept = (compiled_code() | os.environ)["TORCHINDUCTOR_CACHE_DIR"]
        Path(kept).mkdir(parents=True, exist_ok=True)
        (folder / f"torchinductor_{getpass.getuser()}").symlink_to(Path(kept).absolute())


@contextmanager
def entered() -> Iterator[None]:
    """Use a run's folder in this process: the one that it was given, or a new one."""
    given = current()
    if given:
        remove_stale(given.parent)
        yield
        return
    before = os.environ.get("TMPDIR")
    with Scratch() as own:
        own.enter()
        try:
            yield
        finally:
            os.environ.pop("TMPDIR")
            os.environ.update({} if before is None else {"TMPDIR": before})
            tempfile.tempdir = None


def remove_with_it(paths: Iterable[Path]) -> None:
    """Register a path elsewhere, such as in shared memory, to be removed however this process
    ends.
    """
    folder = current()
    lines = "".join(f"{path}\n" for path in paths)
    if folder is not None and lines:
        with (folder / ELSEWHERE).open("a", encoding="utf-8") as file:
            file.write(lines)


def remove_stale(parent: Path) -> None:
    """Remove the folders of this user's runs whose owner has ended."""
    for folder in parent.glob(PREFIX + "*"):
        if is_abandoned(folder):
            _remove(folder)


def _remove(folder: Path) -> None:
    try:
        elsewhere = (folder / ELSEWHERE).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        elsewhere = []
    for path in (*map(Path, elsewhere), folder):
        remove(path)


def segments_of_session(session: int) -> set[str]:
    """Return the segments that processes of this session have mapped; empty without /proc."""
    found: set[str] = set()
    for folder in PROCESSES.glob("[0-9]*"):
        # a process may end at any moment, and those of other users cannot be read
        with suppress(OSError):
            if os.getsid(int(folder.name)) == session:
                found |= set(SEGMENT.findall((folder / "maps").read_text()))
    return found


def remove_segments(names: Iterable[str]) -> None:
    for name in names:
        (SHARED_MEMORY / name).unlink(missing_ok=True)
