"""Export of a run's last and best policy as Hugging Face folders, at its end, by all stages and
expert ranks.
"""

import json
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Protocol

from megatron_rl.checkpoint import checkpoints
from megatron_rl.distributed import exchange
from megatron_rl.files import replacing
from megatron_rl.logs import logger
from megatron_rl.models.hf_folder import INDEX, copy_companions, packed
from megatron_rl.models.tensors import write_tensors
from megatron_rl.models.weight_files import stored_tensors
from megatron_rl.tracking.run_dir import RunDir
from megatron_rl.weight_sync.source import ShardSource
from megatron_rl.weight_sync.transports import LearnerWeights, this_rank

log = logger("checkpoint")

FILE_BYTES = 4 << 30


class LoadsWeights(LearnerWeights, Protocol):
    def load_hf(self, path: Path) -> None:
        """Load the weights of a Hugging Face folder, or of a torch_dist checkpoint."""


def export_models(
    learner: LoadsWeights,
    origin: Path,
    run_dir: Path,
    best: str | None,
    has_time: Callable[[], bool],
) -> None:
    """Export the last policy, and the best one if `best` names a metric: at the end of a run, on
    every rank.

    The learner has the best policy's weights after that.
    """
    run = RunDir(run_dir)
    if not has_time():
        newest = max(checkpoints.steps(run.checkpoints), default=None)
        log.warning(f"no time is left to write {run.model}; {_way_out(run, newest)}")
        return
    export_hf(learner, origin, run.model)
    if best is None:
        return
    found = exchange(checkpoints.best_of(run.checkpoints, best))[0]
    if found is None:
        log.warning(f"no checkpoint was kept for {best}: there is no {run.best_model}")
    elif has_time():
        learner.load_hf(checkpoints.path_of(run.checkpoints, found[0]) / checkpoints.POLICY)
        export_hf(learner, origin, run.best_model)
    else:
        log.warning(f"no time is left to write {run.best_model}; {_way_out(run, found[0])}")


def _way_out(run: RunDir, step: int | None) -> str:
    if step is None:
        return "no checkpoint is left to export"
    policy = checkpoints.path_of(run.checkpoints, step) / checkpoints.POLICY
    return f"in the repository, `python tools/convert.py export {policy} FOLDER` exports the checkpoint of step {step}"


def export_hf(learner: LearnerWeights, origin: Path, folder: Path) -> None:
    """Write a Hugging Face folder, on every rank; it appears under its name only when it is
    complete.

    `origin`: folder of the original model, for its config.json and tokenizer.
    """
    rank = this_rank()
    with ExitStack() as first:
        partial = folder
        if rank == 0:
            partial = first.enter_context(replacing(folder))
            partial.mkdir(parents=True)
        partial = Path(exchange(str(partial))[0])
        _write_weights(learner, partial, rank)
        exchange(None)  # barrier: all have written
        if rank == 0:
            _write_index(partial)
            copy_companions(origin, partial)
            shutil.rmtree(folder, ignore_errors=True)


def _write_weights(learner: LearnerWeights, folder: Path, rank: int) -> None:
    source = ShardSource(learner.model, learner.groups)
    # in the order of `source.bucket_tensors`
    tensors = source.tensors(dict(learner.named_parameters()))
    files = packed(
        [spec for specs in source.bucket_tensors for spec in specs or ()], FILE_BYTES
    ).values()
    for number, specs in enumerate(files):
        held = {name: tensor.detach().cpu().clone() for name, tensor in islice(tensors, len(specs))}
        if held:
            write_tensors(
                held, folder / f"{rank:05d}-{number:05d}.safetensors", metadata={"format": "pt"}
            )
    for _ in tensors:  # a rank that writes nothing takes part in the collectives, too
        pass


def _write_index(folder: Path) -> None:
    """Number the files of all ranks, and write the index of tensors to files."""
    weight_map: dict[str, str] = {}
    size = 0
    files = sorted(folder.glob("*.safetensors"))
    for number, file in enumerate(files, 1):
        file = file.rename(folder / f"model-{number:05d}-of-{len(files):05d}.safetensors")
        size += file.stat().st_size
        weight_map |= dict.fromkeys(stored_tensors(file), file.name)
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
