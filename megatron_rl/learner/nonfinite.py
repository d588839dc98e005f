"""Non-finite loss or gradient norm: skips the update, or dumps it and ends the run; reads dumps.

dumps/nonfinite_12/          after 12 optimizer steps
  minibatch_1.safetensors    of the first skipped update in a row; its metrics are metadata
  policy/                    the weights before all of them: a torch_dist checkpoint
  config.yaml                the run's

`megatron-rl rerun-step DUMP` repeats one (rerun.py).
"""

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_rl.batch import Batch, UpdateInputs
from megatron_rl.checkpoint.torch_dist.writer import Block, write_blocks, write_index
from megatron_rl.config.schema import OnNonFinite
from megatron_rl.distributed import exchange
from megatron_rl.learner.policy import RANDOM, Policy
from megatron_rl.logs import logger
from megatron_rl.loss.prox_pass import DRAWS
from megatron_rl.models.tensors import read_tensors, write_tensors
from megatron_rl.types import Metrics

STEPS_IN_A_ROW = 10  # steps whose updates may all be skipped; after more the run is stopped
POLICY = "policy"
CONFIG = "config.yaml"
OF_BATCH = "batch."

Minibatch = tuple[Batch, UpdateInputs]


class NonFiniteError(ArithmeticError):
    """End of a run by a loss or gradient that is not finite."""

    hint = (
        "`megatron-rl rerun-step DUMP` repeats the update and names the first value that is no "
        "number. Then lower optim.lr or optim.megatron.clip_grad; "
        "learner.on_nonfinite=skip_and_dump skips the update and continues."
    )


class NonFiniteUpdates:
    """Skips an update with a non-finite loss or gradient norm, or ends the run; on all ranks."""

    def __init__(
        self,
        learner: Policy,
        weights: Callable[[], Iterator[Block]],
        dump_dir: Path | None,
    ) -> None:
        self._learner = learner
        self._weights = weights
        self._dump_dir = dump_dir
        self._most = STEPS_IN_A_ROW * learner.learner.n_minibatches
        self._draws = any(getattr(learner.megatron_config, name) for name in DRAWS)
        self._random: dict[str, Tensor] = {}

    def begin(self) -> None:
        """Keep the random states before an update that draws from them: they are part of it."""
        if self._draws:
            self._random = self._learner.random_states()

    def met(
        self,
        minibatch: Callable[[], Minibatch | None],
        metrics: Metrics,
        norm: float,
    ) -> None:
        """`minibatch`: called on all ranks, returns the minibatch on the driver."""
        learner = self._learner
        learner.left_out_in_a_row += 1
        policy = learner.learner.on_nonfinite
        steps = learner.steps
        in_a_row = learner.left_out_in_a_row
        found = f"loss {metrics.get('loss/total', 0.0)}, gradient norm {norm} after {steps} optimizer steps"
        ends = policy is OnNonFinite.raise_ or in_a_row > self._most
        where = ""
        if self._dump_dir is not None and (ends or policy is OnNonFinite.skip_and_dump):
            where = self._dump(self._dump_dir, minibatch(), {**metrics, "optim/grad_norm": norm})
        if policy is OnNonFinite.raise_:
            raise NonFiniteError(
                f"{found}: not a number, so the policy was left as it is{where}. "
                "learner.on_nonfinite=skip skips this minibatch and continues, skip_and_dump also "
                "writes each to disk"
            )
        if ends:
            raise NonFiniteError(
                f"{found}: not a number, {in_a_row} updates in a row; learner.on_nonfinite="
                f"{policy.value} leaves out {self._most}, those of {STEPS_IN_A_ROW} steps{where}. "
                "Lower optim.lr, or fix the cause of the value, and resume from a checkpoint"
            )
        logger("learner").warning(f"{found}: not a number, so this update is skipped{where}")

    def _dump(self, dump_dir: Path, minibatch: Minibatch | None, metrics: Metrics) -> str:
        """Write the update on all ranks; return how to repeat it, or the error."""
        folder = dump_dir / f"nonfinite_{self._learner.steps}"
        number = self._learner.left_out_in_a_row
        path = folder / f"minibatch_{number}.safetensors"
        whole = exchange(number > 1 and (folder / POLICY / "metadata.json").exists())[0]
        problem = self._on_driver(lambda: self._write_minibatch(path, minibatch, metrics, whole))
        if problem is None and not whole:
            problem = self._write_policy(folder / POLICY)
        if problem is not None:
            return f" (it could not be written: {problem})"
        return f"; `megatron-rl rerun-step {path}` repeats it"

    def _on_driver(self, write: Callable[[], None]) -> str | None:
        """Write on the driver alone; return the error, if any, on every rank."""
        problem = None
        if self._learner.is_driver:
            try:
                write()
            except (OSError, ValueError) as error:
                problem = str(error)
        return exchange(problem)[0]

    def _write_minibatch(
        self, path: Path, minibatch: Minibatch | None, metrics: Metrics, whole: bool
    ) -> None:
        assert minibatch is not None, "the driver has it"
        batch, targets = minibatch
        path.parent.mkdir(parents=True, exist_ok=True)
        if not whole:
            shutil.rmtree(path.parent / POLICY, ignore_errors=True)
            (path.parent / POLICY).mkdir()
        config = path.parent.parent.parent / CONFIG  # of the run
        if config.is_file():
            shutil.copyfile(config, path.parent / CONFIG)
        about = {
            "metrics": dict(metrics),
            "layout": asdict(self._learner.layout),
            "steps": self._learner.steps,
        }
        parts = {f"{OF_BATCH}{name}": column for name, column in batch.columns.items()}
        # clones: the file refuses tensors that share memory
        tensors = {name: column.clone() for name, column in (parts | targets.columns).items()}
        write_tensors(tensors | self._random, path, metadata={"about": json.dumps(about)})

    def _write_policy(self, folder: Path) -> str | None:
        """Write each rank's part of the weights; return the error, if any."""
        outcome: dict[str, Any] = {}
        weights = (replace(one, tensor=one.tensor.cpu()) for one in self._weights())
        try:
            outcome["written"] = write_blocks(folder / f"rank_{self._learner.rank}.distcp", weights)
        except (OSError, RuntimeError) as error:
            outcome["problem"] = str(error)
        outcomes = exchange(outcome)
        problem = next((each["problem"] for each in outcomes if "problem" in each), None)
        if problem is not None:
            return str(problem)
        return self._on_driver(
            lambda: write_index(folder, [block for each in outcomes for block in each["written"]])
        )


def read_minibatch(path: Path) -> tuple[Minibatch, dict[str, Tensor], dict[str, Any]]:
    """A dump's minibatch, random states, and metadata."""
    tensors, metadata = read_tensors(path)
    about = json.loads(metadata["about"])
    random = {name: tensors.pop(name) for name in list(tensors) if name.startswith(RANDOM)}
    batch = {
        name.removeprefix(OF_BATCH): tensors.pop(name)
        for name in list(tensors)
        if name.startswith(OF_BATCH)
    }
    absent: dict[str, Any] = {"anchor_logprobs_N": None, "ref_logprobs_N": None}
    return (Batch(**batch), UpdateInputs(**absent | tensors)), random, about
