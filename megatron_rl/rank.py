"""Process of a learner rank: signals, secrets, watch, then train.py's loop; started by launch.py,
srun or torchrun. `alone` prepares another command's process for a learner of one rank.
"""

import faulthandler
import logging
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from megatron_rl.config import ConfigError, from_mapping, to_yaml
from megatron_rl.config.plain_yaml import read_yaml
from megatron_rl.config.schema import Config
from megatron_rl.logs import configure
from megatron_rl.processes import job, process
from megatron_rl.processes.environment import DRIVER_SECRETS, compiled_code, is_secret
from megatron_rl.processes.folder_lock import current
from megatron_rl.processes.heartbeat import Heartbeat
from megatron_rl.rewards.user_process import StartTimeout
from megatron_rl.supervision.attempts import REFUSED
from megatron_rl.supervision.watch import RankHangDetector
from megatron_rl.tracking.causes import write_end
from megatron_rl.tracking.run_dir import LAUNCHER, RunDir


def main(run_dir: Path, parent: int) -> None:
    # set also under nohup, which leaves the signal ignored
    signal.signal(
        process.AT_ONCE,
        process.raise_interrupt if os.environ.get("RANK") == "0" else signal.SIG_DFL,
    )
    process.die_with_parent(parent, by=process.AT_ONCE)
    for name, value in process.SHORT_SPIN.items():  # read when torch is loaded
        os.environ.setdefault(name, value)
    process.keep_freed_memory()
    config = from_mapping(read_yaml((run_dir / "config.yaml").read_text(encoding="utf-8")))
    try:
        run_rank(config, run_dir)
    except Exception as error:
        status = 1
        if isinstance(error, ConfigError):  # its text is for the user, without a traceback
            print(f"error: {error}", file=sys.stderr)
            if not isinstance(error, StartTimeout):
                status = REFUSED
        else:
            traceback.print_exception(error)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # the interpreter's own end takes minutes on a busy machine


def run_rank(config: Config, run_dir: Path) -> None:
    """Run the loop as this process's rank, which the environment gives."""
    _leave_out_advice()
    rank = int(os.environ["RANK"])
    configure(sys.stdout, logging.ERROR if rank else logging.NOTSET)
    # Slurm and torchrun signal every task: the driver handles it once it exists; the other ranks
    # follow the driver
    if rank:
        process.leave_to_the_driver()
    else:
        signal.signal(signal.SIGTERM, end_on_sigterm)
        for number in (signal.SIGINT, process.STOP_AFTER_STEP):
            signal.signal(number, process.raise_interrupt)
        process.release(process.STOP_AFTER_STEP)
    for name in filter(is_secret, list(os.environ)):
        if rank or name not in DRIVER_SECRETS:
            del os.environ[name]
    os.environ.update(compiled_code())
    faulthandler.register(process.SHOW_STACKS, all_threads=True)
    heartbeat = Heartbeat(run_dir, rank)
    launcher = int(os.environ.get(LAUNCHER, "0")) or None
    heartbeat.each.append(RankHangDetector(run_dir, config.run.hang_timeout_s, rank, launcher))
    heartbeat.start()
    with process.rare_collections(), process.hidden("wandb"):
        from megatron_rl.distributed import set_wait_policy
        from megatron_rl.learner.modules import cpu  # before anything imports megatron
        from megatron_rl.train import train

    heartbeat.each.append(set_wait_policy)
    try:
        cpu.require(config.run.device)
        train(config, to_yaml(config), run_dir, rank, force_exit_after_last_word)
    except Exception as error:
        logs = RunDir(run_dir).logs
        write_end((current() or logs, logs), rank, error)  # for the launcher
        raise
    finally:
        heartbeat.end()
        force_exit_after_last_word()


@contextmanager
def alone() -> Iterator[None]:
    """Prepare this process for a one-rank learner in any job; import that inside the block."""
    _leave_out_advice()
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MEGATRON_RL_RENDEZVOUS"):
        os.environ.pop(name, None)
    for name, value in process.SHORT_SPIN.items():
        os.environ.setdefault(name, value)
    os.environ.update(compiled_code())
    with process.rare_collections():
        from megatron_rl.learner.modules import cpu  # noqa: F401 - before anything imports megatron

        yield


def _leave_out_advice() -> None:
    """Silence warnings of Megatron and torch.distributed that every rank repeats."""
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")


def force_exit_after_last_word() -> None:
    """End the process soon, even if a thread blocks the interpreter.

    The dump needs no Python, and writes to /dev/null: the log shall end with the reason.
    """
    faulthandler.dump_traceback_later(
        process.LEAVE_S, exit=True, file=os.open(os.devnull, os.O_WRONLY)
    )


def end_on_sigterm(number: int, frame: FrameType | None) -> None:
    """Handle SIGTERM, which Slurm also sends when another task of the job has failed."""
    if LAUNCHER not in os.environ and job.is_running():
        raise RuntimeError(job.ANOTHER_ENDED)
    process.raise_interrupt(number, frame)


if __name__ == "__main__":
    with process.best_effort_output():
        main(Path(sys.argv[1]), int(sys.argv[2]))
