"""Profiler of a learner's rank: torch.profiler traces of chosen steps, and a report of a GPU that
is out of memory.
"""

import gc
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from megatron_rl.logs import logger

# traced micro-batches per pass, its last ones: an update of 36 layers is 60 MB on a CPU, 4
# compressed
MICRO_BATCHES = 2
LARGEST = 40  # kinds of tensors that are listed
PLAIN = (torch.Tensor, torch.nn.Parameter)
NO_FOLDER = Path()


class Profiler:
    """torch.profiler over this rank's passes in the steps of `log.profile_steps`: a trace of the
    end of each.
    """

    def __init__(
        self,
        steps: Sequence[int],
        folder: Path | None,
        rank: int | None,
    ) -> None:
        # rank: None if another rank records
        self._steps = steps if folder is not None and rank is not None else ()
        self._folder = folder or NO_FOLDER
        self._rank = rank
        self._step: int | None = None
        self._passes = self._to_come = 0
        self._running: profile | None = None

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Context of a step of the learner."""
        self._step = step if step in self._steps else None
        self._passes = 0
        try:
            yield
        finally:
            self._step = None

    @contextmanager
    def tracing(self, name: str, micro_batches: int) -> Iterator[None]:
        """Context of a pass over so many micro-batches."""
        if self._step is None:
            yield
            return
        self._passes = self._passes + 1
        self._to_come = micro_batches
        try:
            yield
            self._write(f"rank_{self._rank}_pass_{self._passes}_{name}.json.gz")
        finally:
            self._running = None

    def micro_batch(self) -> None:
        """Hook of a pass, before each micro-batch's forward."""
        if self._step is None:
            return
        if self._running is None and self._to_come <= MICRO_BATCHES:
            gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
            self._running = profile(activities=[ProfilerActivity.CPU, *gpu], record_shapes=True)
            self._running.start()
        self._to_come -= 1

    def _write(self, name: str) -> None:
        if self._running is None:  # a pass without a micro-batch
            return
        self._running.stop()
        folder = self._folder / f"profile_{self._step}"
        said = f"traces are in {folder}; open them in https://ui.perfetto.dev"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._running.export_chrome_trace(str(folder / name))
        except OSError as error:  # the run continues
            said = f"no trace in {folder}: {error.strerror or error}"
        if self._passes == 1:
            logger("learner").info(f"profile of step {self._step}: {said}")


@contextmanager
def dump_on_oom(folder: Path, rank: int) -> Iterator[None]:
    """When a GPU runs out of memory, list its tensors in a file, and name that in the error."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        tensors = folder / f"memory_rank_{rank}.txt"
        with suppress(OSError):  # a full disk must not hide the error
            folder.mkdir(parents=True, exist_ok=True)
            summary = torch.cuda.memory_summary() if torch.cuda.is_available() else ""
            tensors.write_text("\n".join([*_largest(), summary]), encoding="utf-8")
            # a line: the launcher reads logs by lines
            error.args = (f"{error} Its largest tensors are listed in {tensors}",)
        raise


def _largest() -> Iterator[str]:
    """Tensors that Python knows, grouped by kind. Those that autograd alone keeps are missing."""
    held: dict[int, tuple[int, torch.Tensor]] = {}
    for one in gc.get_objects():
        # others wrap such, or are a compiler's
        if type(one) in PLAIN and one.layout is torch.strided:
            storage = one.untyped_storage()
            with suppress(RuntimeError):  # it has no memory
                held[storage.data_ptr()] = storage.nbytes(), one
    alike: Counter[str] = Counter()
    bytes_of: Counter[str] = Counter()
    for nbytes, one in held.values():
        kind = f"{one.device} {str(one.dtype).removeprefix('torch.')} {list(one.shape)}"
        alike[kind] += 1
        bytes_of[kind] += nbytes
    yield f"{sum(bytes_of.values()) / 2**30:.2f} GiB in {sum(alike.values())} tensors that Python holds"
    for kind, nbytes in bytes_of.most_common(LARGEST):
        yield f"{nbytes / 2**20:10.1f} MiB  {alike[kind]:5d} x {kind}"
