"""Automatic restarts of a failed run: `train --attempts N`, and the requeue check of the batch
scripts.

    python -m megatron_rl.supervision.attempts failed RECIPE [key=value ...]           0: another start
    would go on
    python -m megatron_rl.supervision.attempts stopped,failed RECIPE [key=value ...]   of a job that
    was asked to stop

A run that failed is started again, but not once two attempts in a row (of a queued job: one) have
come no further.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from megatron_rl.checkpoint import checkpoints
from megatron_rl.config import load
from megatron_rl.config.schema import CheckpointSection, Config, IfExists
from megatron_rl.processes.folder_lock import held
from megatron_rl.processes.process import raise_interrupt
from megatron_rl.tracking.metrics_file import read_metrics
from megatron_rl.tracking.run_dir import RunDir
from megatron_rl.tracking.status import known_status, read_status

REFUSED = 2  # exit status of a command whose configuration is wrong
MAX_WITHOUT_PROGRESS = 2  # attempts in a row without progress
PAUSE_S = 5.0
RELEASE_S = 60.0


def run_attempts(
    start: Callable[[Config], int], config: Config, attempts: int, say: Callable[[str], None]
) -> int:
    """Start the run, and restart it while it fails, at most `attempts` times; return the last exit
    status.
    """
    path = config.run.folder
    if config.run.if_exists is IfExists.resume:
        furthest = how_far(path)
    else:
        furthest = (0, 0)
    without_progress = 0
    for attempt in range(1, attempts + 1):
        status = start(config)
        said = read_status(path)
        if status in (0, REFUSED) or said.get("state") != "failed" or attempt == attempts:
            return status
        reached = how_far(path)
        if any(new > old for new, old in zip(reached, furthest, strict=True)):
            without_progress = 0
        else:
            without_progress = without_progress + 1
        furthest = max(furthest[0], reached[0]), max(furthest[1], reached[1])
        reason = str(said.get("reason")).partition("\n")[0]
        if without_progress == MAX_WITHOUT_PROGRESS:
            say(
                f"attempt {attempt} of {attempts} has failed, the second in a row without "
                f"further: {reason}"
            )
            return status
        say(
            f"attempt {attempt} of {attempts} has failed: "
            f"{reason}\n{next_start(path, config.checkpoint)}"
        )
        # the handlers are those of the attempt that has ended
        for number in (
            signal.SIGINT,
            signal.SIGTERM,
        ):
            signal.signal(number, raise_interrupt)
        time.sleep(PAUSE_S)
        deadline = time.monotonic() + RELEASE_S
        # a crowded machine takes its time to clear processes away
        while held(path) and time.monotonic() < deadline:
            time.sleep(0.2)
        config = replace(config, run=replace(config.run, if_exists=IfExists.resume))
    return status


def how_far(path: Path) -> tuple[int, int]:
    """(the last step with a line of metrics, the newest checkpoint); 0 where there is none."""
    run = RunDir(path)
    step = 0
    if run.metrics.is_file():
        for line in read_metrics(run.metrics)[-1:]:
            step = int(line["progress/step"])
    return step, max(checkpoints.steps(run.checkpoints), default=0)


def next_start(path: Path, section: CheckpointSection) -> str:
    step = how_far(path)[1]
    if step:
        return f"the next one resumes after step {step}, in {PAUSE_S:.0f} s"
    why = ""
    if not section.every:
        why = ": checkpoint.every is 0"
    return f"the next one begins again, in {PAUSE_S:.0f} s, because there is no checkpoint{why}"


def should_retry(path: Path, states: Sequence[str]) -> tuple[bool, str]:
    """Decide whether to requeue a job whose run ended in one of `states`; return the decision and
    its reason.
    """
    status = known_status(path)
    state = status.get("state")
    reason = str(status.get("reason")).partition("\n")[0]
    step = how_far(path)[1]
    before = status.get("resumes_after") or 0
    again = False
    if state not in states:
        why = f"is {state or 'not there'}, not {' or '.join(states)}"
    elif status.get("restarts") != os.environ.get("SLURM_RESTART_COUNT"):
        why = f"has not begun in this start of the job; before, it was {state}"
    elif step <= before:
        why = f"has no checkpoint after step {before}"
    else:
        again = True
        why = f"resumes after step {step}"
    return again, f"the run in {path} {why}: {reason}"


def main(arguments: Sequence[str]) -> int:
    states, recipe, *overrides = arguments
    config = load(Path(recipe), overrides)
    again, why = should_retry(config.run.folder, states.split(","))
    print(why)
    return 0 if again else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
