"""Writes report.html into the directory of a run that has ended."""

from megatron_rl.logs import logger
from megatron_rl.tracking.run_dir import RunDir


def finish(run: RunDir) -> str:
    """Write the report if there is a line of metrics; return a line with its path or the failure.

    It never raises, so that the end of the run stays visible.
    """
    try:
        if not run.metrics.is_file() or not run.metrics.stat().st_size:
            return ""
        logger("report").info("drawing")
        from megatron_rl.apps.reports.report import write_report

        write_report([run.path], run.report)
    except Exception as error:
        return f"report.html was not written: {type(error).__name__}: {error}"
    return f"report: {run.report}"
