"""A run's checkpoint folders, which saver.py fills: lists, verifies, completes (manifest and name)
and removes them.

checkpoints/step_120/
  policy/           weights and optimizer: a torch_dist checkpoint
  ranks/            random states and measurements of each rank
  sync.safetensors  state of the weight sync
  checkpoint.json   written last: every other file with its size and checksum, and the driver's
                    position

A folder gets its name when it is complete; an incomplete one is called `.step_120.partial`.
"""

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import msgspec
import xxhash

from megatron_rl.checkpoint.torch_dist.index import read_index
from megatron_rl.config import ConfigError
from megatron_rl.files import open_regular, publish_folder, read_json, remove, write_atomic
from megatron_rl.models.weight_files import refuse_links_out, stored_tensors

MANIFEST = "checkpoint.json"
POLICY = "policy"
RANKS = "ranks"
SYNC = "sync.safetensors"
FORMAT = 1
NAME = re.compile(r"step_(0|[1-9][0-9]{0,17})")
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 60)]


class IncompleteCheckpoint(ConfigError):
    """An incomplete or damaged checkpoint; the text names the damage."""

    hint = (
        "`megatron-rl checkpoints RUN` lists complete ones; run.if_exists=resume skips the others."
    )


class DriverState(msgspec.Struct, frozen=True):
    """State of rank 0 in a manifest, to resume from."""

    position: Count
    seen: dict[str, Count]
    line: str | None = None
    data: str | None = None  # checksum of the prompts and answers that the position refers to


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Manifest of a checkpoint; untrusted input."""

    path: Path
    step: Count
    updates: Count  # optimizer steps
    layout: dict[str, Count | None]
    driver: DriverState
    files: dict[str, tuple[Count, str]]  # name -> bytes, checksum
    time: str
    best: tuple[str, float] | None = None  # metric for which it was kept, and its value

    @property
    def said(self) -> bool:
        """True if its step has a line of metrics; else the line is kept here, as far as known."""
        return self.driver.line is None

    @property
    def nbytes(self) -> int:
        return sum(size for size, _ in self.files.values())


def path_of(root: Path, step: int) -> Path:
    return root / f"step_{step}"


def partial_of(root: Path, step: int) -> Path:
    return root / f".step_{step}.partial"


def steps(root: Path) -> list[int]:
    """Return the steps of all checkpoint folders, complete or not, newest first."""
    entries = root.iterdir() if root.is_dir() else ()  # raises if the folder cannot be read
    found = [NAME.fullmatch(entry.name) for entry in entries if entry.is_dir()]
    return sorted((int(name[1]) for name in found if name), reverse=True)


def publish(partial: Path, root: Path, **about: Any) -> Checkpoint:
    """Finish a save: write the manifest and rename the folder. `files` are those of `digest`."""
    manifest = {"format": FORMAT, "time": datetime.now(UTC).isoformat(timespec="seconds"), **about}
    write_atomic(
        partial / MANIFEST,
        json.dumps({"content": manifest, "checksum": _checksum(manifest)}, indent=1),
    )
    final = path_of(root, about["step"])
    remove(final)  # left by an attempt that resumed from an older checkpoint
    publish_folder(partial, final)
    return read(final)


def digest(path: Path, between: Callable[[], None] = lambda: None) -> tuple[int, str]:
    """Return size and checksum of a file on disk. `between`: called after each piece read."""
    state = xxhash.xxh3_64()
    with open_regular(path) as file:
        while piece := file.read(1 << 22):
            state.update(piece)
            between()
        return file.tell(), state.hexdigest()


def read(path: Path) -> Checkpoint:
    """Read the manifest of a checkpoint without checking its files."""
    if path.is_symlink():
        raise IncompleteCheckpoint(f"{path} is a link; put the folder itself there")
    if not os.path.lexists(path / MANIFEST):
        raise IncompleteCheckpoint(f"{path} has no {MANIFEST}")
    try:
        refuse_links_out(path, [MANIFEST])
        stored = read_json(path / MANIFEST)
        content = stored.get("content")
        if not isinstance(content, dict) or stored.get("checksum") != _checksum(content):
            raise ValueError("it was changed after it was written")
        if content.get("format") != FORMAT:
            raise ValueError("it was written by another version of this project")
        found = msgspec.convert({**content, "path": path}, Checkpoint)
        if path.name != path_of(path.parent, found.step).name:
            raise ValueError(f"it is that of step {found.step}")
    except (OSError, ValueError, RecursionError) as error:
        raise IncompleteCheckpoint(f"{path / MANIFEST} is not to be trusted: {error}") from None
    return found


def verify(path: Path) -> Checkpoint:
    """Read every byte and compare it with the manifest; then check that tensors are readable."""
    found = read(path)
    for name, (size, checksum) in found.files.items():
        file = path / name
        try:
            refuse_links_out(path, [name])
            there = file.stat().st_size
            same = there == size and digest(file) == (size, checksum)
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise IncompleteCheckpoint(f"{file} cannot be read ({why})") from None
        if there != size:
            raise IncompleteCheckpoint(f"{file} has {there} bytes, its manifest says {size}")
        if not same:
            raise IncompleteCheckpoint(
                f"{file} was changed after it was written: its checksum differs"
            )
    try:  # by headers and indexes
        if not read_index(path / POLICY):
            raise ValueError(f"{path / POLICY} holds no tensors")
        if SYNC not in found.files:
            raise ValueError(f"its manifest lists no {SYNC}")
        for name in found.files:
            if name == SYNC or name.startswith(f"{RANKS}/"):
                stored_tensors(path / name)
    except (OSError, ValueError) as error:
        raise IncompleteCheckpoint(f"{path} cannot be resumed from: {error}") from None
    return found


def complete_checkpoints(root: Path, note: Callable[[str], None]) -> Iterator[Checkpoint]:
    """Yield complete checkpoints, newest first; incomplete ones are left in place and noted."""
    for step in steps(root):
        try:
            found = verify(path_of(root, step))
        except IncompleteCheckpoint as error:
            note(f"the checkpoint of step {step} is incomplete and skipped: {error}")
        else:
            yield found


def prune(root: Path, keep_last: int, metric: str | None) -> list[int]:
    """Remove all but the last ones and the best by a metric. Return their steps."""
    present = steps(root)
    kept = set(present[:keep_last])
    if best := best_of(root, metric):
        kept.add(best[0])
    removed = [step for step in present if step not in kept]
    for step in removed:
        doomed = partial_of(root, step)  # a half-removed folder does not look like a checkpoint
        path_of(root, step).rename(doomed)
        remove(doomed)
    return removed


def clean(root: Path) -> None:
    """Remove incomplete saves of earlier attempts."""
    for entry in root.glob(".step_*.partial"):
        remove(entry)


def forget_after(root: Path, step: int) -> None:
    """Remove checkpoints after `step`: a run that resumes from an older one writes them again."""
    for newer in steps(root):
        if newer > step:
            remove(path_of(root, newer))


def best_of(root: Path, metric: str | None) -> tuple[int, float] | None:
    """Step and value of the first checkpoint with the highest value of this metric."""
    found = []
    for step in steps(root) if metric else ():
        with suppress(IncompleteCheckpoint):
            best = read(path_of(root, step)).best
            if best and best[0] == metric:
                found.append((step, best[1]))
    return max(found, key=lambda one: (one[1], -one[0]), default=None)


def _checksum(content: Mapping[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(content, sort_keys=True).encode())
