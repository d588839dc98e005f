"""What is said and written about a run that has ended: why, where everything lies, its report."""

from __future__ import annotations

from megatron_rl.runs import checkpoints
from megatron_rl.runs.run_dir import RunDir


def write_own_report(run: RunDir) -> str:
    """Once there is a line of metrics; returns what prevented it, as nothing may hide how the run itself ended."""
    try:
        if not run.metrics.is_file() or not run.metrics.stat().st_size:
            return ""
        from megatron_rl.runs.report import write_report

        write_report([run.path], run.report)
    except Exception as error:
        return f"report.html was not written: {type(error).__name__}: {error}"
    return ""


def came_to(run: RunDir) -> dict[str, float]:
    """The run as a few numbers, as comparisons have them; none of a folder that is gone."""
    from megatron_rl.runs.comparison import numbers
    from megatron_rl.runs.run_data import NotARun, load_run

    try:
        return numbers(load_run(run.path))
    except NotARun:
        return {}


def describe_contents(run: RunDir) -> str:
    if not run.metrics.exists():
        return f"{run.path} is gone"
    n_rollouts = len(list(run.rollouts.glob("step_*.parquet")))
    n_checkpoints = len(checkpoints.steps(run.checkpoints))
    with run.metrics.open("rb") as lines:
        n_lines = sum(1 for _ in lines)
    rows = [
        ("metrics.jsonl", f"{n_lines} lines"),
        ("rollouts/", f"{n_rollouts} recorded steps") if n_rollouts else None,
        ("checkpoints/", f"{n_checkpoints} checkpoints") if n_checkpoints else None,
        ("model/", "the last policy, as a Hugging Face folder") if run.model.is_dir() else None,
        ("model-best/", "the best one by checkpoint.best") if run.best_model.is_dir() else None,
        (f"logs/attempt_{run.attempt}/", ""),
        ("report.html", "opens offline") if run.report.exists() else None,
    ]
    lines_ = [f"in {run.path}/:", *(f"  {name:<18}{about}".rstrip() for name, about in filter(None, rows))]
    return "\n".join(lines_)
