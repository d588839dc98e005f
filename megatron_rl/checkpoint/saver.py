"""Saver and loader of checkpoints, one on every rank: it copies the learner's and the weight sync's
state into memory, and a thread writes the files while training continues.

Every rank calls the same methods at the same steps. All but weights and optimizer is saved as at
the last `snapshot_rng_and_stats`: a step that is aborted before its update leaves no trace. The
thread is throttled if it shares cores with the learner. When every rank is done, rank 0 renames the
folder.
"""

import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from torch import Tensor

from megatron_rl.checkpoint import checkpoints
from megatron_rl.checkpoint.checkpoints import POLICY, RANKS, SYNC, Checkpoint, IncompleteCheckpoint
from megatron_rl.checkpoint.torch_dist.reader import Reader
from megatron_rl.checkpoint.torch_dist.writer import Block, write_blocks, write_index
from megatron_rl.config.schema import CheckpointSection
from megatron_rl.distributed import exchange
from megatron_rl.files import JsonObject, fsync, remove
from megatron_rl.logs import logger
from megatron_rl.models.layout import Layout
from megatron_rl.models.tensors import read_tensors, write_tensors
from megatron_rl.processes.threads import Throttle, in_thread

ALIGNMENT = 64
FAILED_SAVES = "progress/failed_saves"
BESIDE = 0.1  # of a core, for the thread that writes beside a learner without a device of its own
# this rank's own, its text, the sync's
Tensors = dict[str, Tensor]
_Small = tuple[Tensors, dict[str, str], Tensors | None]


class SavedSync(Protocol):
    """A part of the run that is the same on every rank, such as the scales of the weight sync."""

    def state(self) -> Tensors: ...

    def restore(self, state: Mapping[str, Tensor], repeats: bool) -> None: ...


class SavedLearner(Protocol):
    """Interface of the learner to checkpoints (learner/state.py)."""

    rank: int
    is_driver: bool
    layout: Layout
    device: torch.device

    @property
    def steps(self) -> int: ...

    def blocks(self) -> Iterator[Block]: ...

    def own(self) -> tuple[Tensors, dict[str, str]]: ...

    def restore(self, reader: Reader, steps: int) -> None: ...

    def restore_own(self, tensors: Tensors, text: dict[str, str]) -> None: ...

    def restore_measured(self, ranks: list[Tensors]) -> None: ...


class Saver:
    """Saver of one rank. A failed save is reported; the run continues, and older checkpoints are
    kept.
    """

    def __init__(
        self,
        root: Path,
        section: CheckpointSection,
        learner: SavedLearner,
        sync: SavedSync,
    ) -> None:
        self._root = root
        self._section = section
        self._learner = learner
        self._sync = sync
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._pending: _Save | None = None
        self._small: _Small | None = None
        self.newest: int | None = None  # step of the last save or load
        self.seconds: float | None = None  # duration of the longest save so far
        # number of consecutive failed saves, once one has failed
        self.metrics: dict[str, float] = {}
        if learner.is_driver:
            checkpoints.clean(root)

    def snapshot_rng_and_stats(self) -> None:
        """Snapshot all but weights and optimizer, which do not change before the next update."""
        if self._section.every:
            self._small = (
                *self._learner.own(),
                self._sync.state() if self._learner.is_driver else None,
            )

    def begin(self, step: int, about: Mapping[str, Any]) -> None:
        """Copy the state and start to write. `about`: the run's own state."""
        begun = time.monotonic()
        self.settle(wait=True)
        partial = checkpoints.partial_of(self._root, step)
        problem = None
        if self._learner.is_driver:
            try:
                remove(partial)
                # never recreate a run's directory that was removed
                for folder in (
                    partial,
                    partial / POLICY,
                    partial / RANKS,
                ):
                    folder.mkdir()
            except OSError as error:
                problem = f"{type(error).__name__}: {error}"
        if problem := exchange(problem)[0]:
            self._failed(step, partial, problem)
            return
        blocks = self._copied(list(self._learner.blocks()))
        if self._small is None:
            self.snapshot_rng_and_stats()
        assert self._small is not None
        small = self._small
        rank = self._learner.rank
        pace = Throttle(BESIDE if self._learner.device.type == "cpu" else 1.0)

        def write() -> JsonObject:
            written = _write(partial, rank, blocks, small, pace)
            return written | {"seconds": time.monotonic() - begun - pace.rested}

        self._pending = _Save(
            step, partial, self._learner.steps, about, pace, in_thread("checkpoint", write)
        )

    @property
    def kept(self) -> str:
        """Describe the state that can be resumed if the run ends now."""
        if self.newest is not None:
            return f"the state after step {self.newest} is kept"
        if self._section.every:
            return "no state is kept"
        return "no state is kept: checkpoint.every is 0"

    def settle(self, wait: bool = False) -> None:
        """All ranks: publish the save that is under way, once it is on disk everywhere."""
        save = self._pending
        if save is None:
            return
        if wait:
            save.pace.hurry()
            save.future.exception()
        if not all(exchange(save.future.done())):
            return
        self._pending = None
        outcomes = exchange(save.outcome())
        problems = [outcome["problem"] for outcome in outcomes if "problem" in outcome]
        if self._learner.is_driver and not problems:
            try:
                self._publish(save, outcomes)
            except (OSError, ValueError) as error:
                problems = [f"{type(error).__name__}: {error}"]
        if problems:
            self._failed(save.step, save.partial, problems[0])
            return
        self.newest = save.step
        self.metrics = dict.fromkeys(self.metrics, 0.0)
        self.seconds = max(self.seconds or 0.0, *(outcome["seconds"] for outcome in outcomes))

    def load(self, found: Checkpoint) -> None:
        """Load into the learner and the sync, from any layout."""
        try:
            self._load(found)
        except (
            OSError,
            ValueError,
            LookupError,
            TypeError,
            RuntimeError,
            SafetensorError,
        ) as error:
            # its checksums are right, so that no older one was chosen
            raise IncompleteCheckpoint(
                f"{found.path} cannot be resumed from ({type(error).__name__}: {error}); move it "
                "away to resume from an older one"
            ) from error

    def _load(self, found: Checkpoint) -> None:
        self._learner.restore(Reader(found.path / POLICY), found.updates)
        # if the metrics of this step are not written yet, its sync is not done either
        self._sync.restore(read_tensors(found.path / SYNC)[0], repeats=found.said)
        self.newest = found.step
        if dict(found.layout) == asdict(self._learner.layout):
            mine = found.path / RANKS / f"rank_{self._learner.rank}.safetensors"
            self._learner.restore_own(*read_tensors(mine))
        else:
            ranks = sorted(name for name in found.files if name.startswith(f"{RANKS}/"))
            self._learner.restore_measured([read_tensors(found.path / name)[0] for name in ranks])

    def close(self) -> None:
        """Finish the save under way; call it before the process group is destroyed."""
        self.settle(wait=True)

    def _publish(self, save: "_Save", outcomes: list[JsonObject]) -> None:
        write_index(
            save.partial / POLICY, [block for outcome in outcomes for block in outcome["written"]]
        )
        files = {name: value for outcome in outcomes for name, value in outcome["files"].items()}
        for path in (save.partial / POLICY).iterdir():
            if (name := f"{POLICY}/{path.name}") not in files:
                files[name] = list(checkpoints.digest(path))
        about = {
            "step": save.step,
            "updates": save.updates,
            "layout": asdict(self._learner.layout),
            "files": files,
        }
        checkpoints.publish(save.partial, self._root, **about, **save.about)
        checkpoints.prune(self._root, self._section.keep_last, self._section.best)

    def _failed(self, step: int, partial: Path, problem: str) -> None:
        self.metrics[FAILED_SAVES] = self.metrics.get(FAILED_SAVES, 0.0) + 1
        if self._learner.is_driver:
            remove(partial)
            kept = checkpoints.steps(self._root)
            if kept:
                older = f"the newest one is of step {kept[0]}"
            else:
                older = "there is none yet"
            logger("checkpoint").warning(
                f"the checkpoint of step {step} was not saved ({problem}); the run continues, "
                f"{older}"
            )

    def _copied(self, blocks: list[Block]) -> list[Block]:
        """Copy the blocks' values into memory that the next save reuses."""
        sizes = [-(-block.tensor.nbytes // ALIGNMENT) * ALIGNMENT for block in blocks]
        if self._buffer.numel() < sum(sizes):
            pinned = self._learner.device.type != "cpu"
            self._buffer = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=pinned)
        copied = []
        at = 0
        for block, size in zip(blocks, sizes, strict=True):
            room = (
                self._buffer[at : at + block.tensor.nbytes]
                .view(block.tensor.dtype)
                .view(block.tensor.shape)
            )
            room.copy_(block.tensor, non_blocking=True)
            copied.append(Block(block.key, block.whole, block.offset, room))
            at += size
        if self._learner.device.type != "cpu":
            torch.cuda.synchronize()
        return copied


@dataclass(frozen=True)
class _Save:
    """A save that is under way."""

    step: int
    partial: Path
    updates: int
    about: Mapping[str, Any]
    pace: Throttle
    future: Future[JsonObject]

    def outcome(self) -> JsonObject:
        """Result of this rank's part of the save, for the other ranks."""
        error = self.future.exception()
        if error is None:
            return self.future.result()
        return {"problem": f"{type(error).__name__}: {error}"}


def _write(
    partial: Path, rank: int, blocks: list[Block], small: _Small, pace: Throttle
) -> JsonObject:
    """Write this rank's files; return their entries for the index and the manifest."""
    own, text, shared = small
    policy = partial / POLICY / f"rank_{rank}.distcp"
    written = write_blocks(policy, blocks, pace)
    paths = [policy, partial / RANKS / f"rank_{rank}.safetensors"]
    write_tensors(own, paths[1], metadata=text)
    if shared is not None:
        paths.append(partial / SYNC)
        write_tensors(shared, paths[2])
    for path in paths[1:]:  # the first is
        fsync(path)
    files = {str(path.relative_to(partial)): list(checkpoints.digest(path, pace)) for path in paths}
    return {"written": written, "files": files}
