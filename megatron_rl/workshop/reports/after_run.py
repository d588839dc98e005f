"""Writes report.html into the directory of a run that has ended."""

from megatron_rl.runs.run_dir import RunDir


def finish(run: RunDir) -> str:
    """Write the report, once there is a line of metrics.

    Returns where it lies or what prevented it, empty without a line: nothing hides how the run
    ended.
    """
    try:
        if not run.metrics.is_file() or not run.metrics.stat().st_size:
            return ""
        print("report   being drawn", flush=True)
        from megatron_rl.workshop.reports.report import write_report

        write_report([run.path], run.report)
    except Exception as error:
        return f"report.html was not written: {type(error).__name__}: {error}"
    return f"report   {run.report}"
