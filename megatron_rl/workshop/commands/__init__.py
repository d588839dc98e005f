"""What people ask on the command line before and after a run."""

from megatron_rl.workshop.commands import (
    chat,
    eval,
    mismatch,
    plan,
    quickstart,
    replay,
    report,
    rerun_step,
    status,
    toy,
    translate,
)

COMMANDS = (plan, toy, quickstart, report, status, eval, mismatch, chat, replay, rerun_step, translate)
