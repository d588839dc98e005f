"""Who is at work when, of some steps of one or several runs, as an SVG.

python tools/figures/lanes_figure.py docs/ahead.svg runs/in_turn runs/ahead_1
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from megatron_rl.workshop.reports.charts import GRID
from megatron_rl.workshop.reports.figures import LANE_NAMES, lane_colour
from megatron_rl.workshop.reports.run_data import ROWS, Lane, load_runs
from megatron_rl.workshop.reports.svg import heading, legend, nice_ticks, picture, small

WIDTH = 1000
LEFT = 84
RIGHT = 16
TOP = 70
ROW = 26
GAP = 6
BETWEEN = 62
SHOWN = ("sampler", "rewards", "rollout", "prox", "update", "sync")


def lanes_svg(titles: Sequence[str], runs: Sequence[Sequence[Lane]]) -> str:
    """All runs to one scale: what ends earlier was faster."""
    longest = max(one.end for spans in runs for one in spans)
    scale = (WIDTH - LEFT - RIGHT) / longest
    parts = list(legend(LEFT, [(LANE_NAMES.get(lane, lane), lane_colour(lane)) for lane in SHOWN]))
    top = TOP
    for title, spans in zip(titles, runs, strict=True):
        parts += _chart(top, title, spans, scale)
        top += len(ROWS) * (ROW + GAP) + BETWEEN
    return picture(WIDTH, top - BETWEEN + 40, parts)


def _chart(top: float, title: str, spans: Sequence[Lane], scale: float) -> Iterable[str]:
    bottom = top + len(ROWS) * (ROW + GAP)
    end = max(one.end for one in spans)
    yield heading(LEFT, top - 12, title)
    for tick in nice_ticks(0.0, end):
        if tick <= end:
            x = LEFT + tick * scale
            yield f'<line x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{bottom}" stroke="{GRID}"/>'
            yield small(x, bottom + 14, "middle", f"{tick:g} s")
    for number, row in enumerate(ROWS):
        y = top + number * (ROW + GAP) + GAP / 2
        yield small(LEFT - 8, y + ROW / 2 + 4, "end", row)
        for one in spans:
            if one.row == row:
                x = LEFT + one.begin * scale
                width = max((one.end - one.begin) * scale, 0.6)
                fill = lane_colour(one.lane)
                yield f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{ROW}" fill="{fill}"/>'
                if one.lane in ("sampler", "update") and width > 24:
                    middle = f'x="{x + width / 2:.1f}" y="{y + 17:.1f}"'
                    yield f'<text {middle} fill="#fff" text-anchor="middle">{one.step}</text>'


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path, help="the SVG")
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN")
    options = parser.parse_args(arguments)
    runs = load_runs(options.runs)
    output = options.output
    without = [run.name for run in runs if not run.lanes]
    if without:
        sys.exit(f"no lanes.jsonl in {', '.join(without)}")
    output.write_text(
        lanes_svg([run.name for run in runs], [run.lanes for run in runs]), encoding="utf-8"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
