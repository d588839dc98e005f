"""Cause of a failed attempt: advice from the exception that ended it, or by its type."""

import errno
import os
import re
import signal
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from megatron_rl.checkpoint.checkpoints import IncompleteCheckpoint
from megatron_rl.config import ConfigError, all_keys
from megatron_rl.config.schema import Config
from megatron_rl.learner.nonfinite import NonFiniteError
from megatron_rl.rewards.pool import RewardsHang
from megatron_rl.rewards.user_process import StartTimeout
from megatron_rl.rollout.collect import RewardError
from megatron_rl.sampler.client.interface import EngineTimeout, SamplerError
from megatron_rl.tracking import causes
from megatron_rl.tracking.alarms import RULES
from megatron_rl.tracking.causes import Cause, of_error, of_exit, read_end, write_end
from megatron_rl.tracking.disk import RecordLost
from megatron_rl.weight_sync.manifest import UpdateRefused
from megatron_rl.weight_sync.probe import SyncMismatch

HINTED = (
    ConfigError,
    IncompleteCheckpoint,
    NonFiniteError,
    RecordLost,
    RewardError,
    RewardsHang,
    SamplerError,
    StartTimeout,
    SyncMismatch,
    UpdateRefused,
)


@pytest.mark.parametrize(
    ("error", "name", "advice"),
    [
        (NonFiniteError("loss"), "NonFiniteError", NonFiniteError.hint),
        (MemoryError(), "MemoryError", causes.MEMORY),
        (torch.OutOfMemoryError("full"), "OutOfMemoryError", causes.BY_TYPE["OutOfMemoryError"]),
        (torch.distributed.DistBackendError("x"), "DistBackendError", causes.DEVICE),
        (OSError(errno.ENOSPC, "full"), "OSError", causes.DISK),
        (OSError(errno.EMFILE, "many"), "OSError", causes.FILES),
        (ConnectionResetError(errno.ECONNRESET, "x"), causes.LOST_PEER, causes.FOLLOWED),
        (RuntimeError("Connection closed by peer"), causes.LOST_PEER, causes.FOLLOWED),
        (ValueError("x"), "ValueError", causes.NO_ADVICE),
    ],
)
def test_advice(error: Exception, name: str, advice: str) -> None:
    found = of_error(error, "rank 1", "update", "rank_1.log")
    assert (found.name, found.process, found.phase) == (name, "rank 1", "update")
    assert found.advice == advice
    assert Cause.read(found.as_fields()) == found


def test_the_process_that_failed_is_named() -> None:
    assert of_error(EngineTimeout("x"), "rank 0").process == SamplerError.process
    assert Cause.read({"class": [], "advice": {}}) is not None  # of another's status.json
    assert Cause.read(None) is None


def test_a_process_that_left_no_word() -> None:
    killed = of_exit(-signal.SIGKILL, "rank 1", "")
    assert (killed.name, killed.process) == ("SIGKILL", "rank 1")
    assert of_exit(-signal.SIGKILL, "rank 1", "", out_of_memory=True).advice == causes.MEMORY
    assert of_exit(-signal.SIGSEGV, "rank 1", "").advice == causes.CRASH
    assert of_exit(3, "rank 1", "").name == "exit status 3"


def test_the_last_words_of_a_rank(tmp_path: Path) -> None:
    folders = [tmp_path / "gone", tmp_path]
    write_end(folders, 1, NonFiniteError("loss is nan"))
    log = tmp_path / "rank_1.log"
    reason, cause = read_end(folders, log, 1, 1, False)
    assert (reason, cause.advice) == ("NonFiniteError: loss is nan", NonFiniteError.hint)
    assert cause.log == os.fspath(log)
    assert read_end(folders, log, 1, -signal.SIGKILL, False)[1].name == "SIGKILL"
    assert read_end(folders, log, 0, 1, False)[0] == "exit status 1"


ADVICE = [
    *(kind.hint for kind in HINTED),
    *(getattr(causes, name) for name in ("MEMORY", "DISK", "FILES", "HANG_HINT", "RESUME")),
    *causes.BY_TYPE.values(),
    *causes.BY_SIGNAL.values(),
    *(rule.action for rule in RULES.values()),
]
SECTIONS = "|".join(field.name for field in fields(Config))
PASSED_THROUGH = ("sampler.vllm.", "learner.megatron.", "optim.megatron.")


@pytest.mark.parametrize("advice", ADVICE)
def test_advice_names_keys_that_exist(advice: str) -> None:
    known = "".join(f"{key}." for key in all_keys())
    for key in re.findall(rf"(?<![\w/.])(?:{SECTIONS})\.\w+(?:\.\w+)*", advice):
        assert f"{key}." in known or key.startswith(PASSED_THROUGH)
