"""The report's list of alarms, made from the metrics anew, by the rules of the code that draws the page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_rl.runs.alarms import RULES, Alarms, News
from megatron_rl.workshop.reports.run_data import RunData
from megatron_rl.workshop.reports.sections import supervised

HEAD = ("alarm", "steps", "value", "bound", "what to do")


@dataclass(frozen=True)
class Episode:
    raised: News
    cleared: int | None  # the step; None: it stood at the end

    @property
    def steps(self) -> str:
        return f"{self.raised.step} to {self.cleared}" if self.cleared is not None else f"from {self.raised.step}"


def episodes(run: RunData) -> list[Episode]:
    """Episodes of alarms, in the order in which they were raised."""
    formats = run.setting("sampler.fleet.formats", []) or [run.setting("quantization.format", "none")]
    alarms = Alarms(run.setting("log.alarms", {}), formats, sampled=not supervised(run))
    raised: dict[str, News] = {}
    found = []
    for line in run.lines:
        for news in alarms.after(line):
            if news.raised:
                raised[news.alarm] = news
            else:
                found.append(Episode(raised.pop(news.alarm), news.step))
    found += [Episode(news, None) for news in raised.values()]
    return sorted(found, key=lambda one: one.raised.step)


def rows(run: RunData) -> Iterator[Sequence[str]]:
    for one in episodes(run):
        rule = RULES[one.raised.alarm]
        side = "below" if rule.below else "above"
        yield (
            one.raised.alarm,
            one.steps,
            f"{one.raised.value:.3g}",
            f"{side} {one.raised.bound:g}",
            rule.action,
        )
