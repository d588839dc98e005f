"""Writes plan.json and report.html into the directory of a run that has ended; says where, or what
prevented it.
"""

from contextlib import suppress

from megatron_rl.config import ConfigError
from megatron_rl.config.schema import Config
from megatron_rl.preflight.machine import detect
from megatron_rl.runs.run_dir import RunDir
from megatron_rl.workshop.planner.table import keep


def finish(run: RunDir, config: Config) -> str:
    """Write plan and report; returns where the report lies or what prevented it, empty without a
    line of metrics.
    """
    if not run.metrics.is_file():
        return ""
    with suppress(ConfigError):  # its device may be why the run has ended: a page without a plan
        keep(config, detect(config.run.device), run)
    return write_own_report(run) or (f"report   {run.report}" if run.report.is_file() else "")


def write_own_report(run: RunDir) -> str:
    """Write the report, once there is a line of metrics; returns what prevented it: nothing hides
    how the run ended.
    """
    try:
        if not run.metrics.is_file() or not run.metrics.stat().st_size:
            return ""
        print("report   being drawn", flush=True)
        from megatron_rl.workshop.reports.report import write_report

        write_report([run.path], run.report)
    except Exception as error:
        return f"report.html was not written: {type(error).__name__}: {error}"
    return ""
