"""A process that is stopped, silent or hangs, from a rank's heartbeat; the timeouts of hangs and of
collectives.

Progress of a rank is a new phase, a micro-batch, an answer of an engine or a reward. Waits for
engines and rewards have timeouts of their own; everything else has `run.hang_timeout_s`.
"""

import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from megatron_rl.config.schema import RewardSection, RunSection, SamplerSection
from megatron_rl.processes.process import birth_of, work_below

MARGIN_S = 60.0  # after a limit of its own, in which whoever waits ends the wait itself
SHORT = 8  # lines of a stack in status.json, which fits into one block of a disk


@dataclass(frozen=True)
class Trouble:
    how: str
    process: str
    pid: int | None
    host: str
    phase: str
    seconds: float
    rank: int | None = None  # it, or the one that has started it
    blocks: bool = False  # whether the run cannot go on without it
    note: str = ""
    stack: tuple[str, ...] = ()
    here: bool = False  # a process that can be reached from this one

    @property
    def key(self) -> tuple[str, str, int | None]:
        return self.how, self.process, self.pid

    def __str__(self) -> str:
        if self.pid:
            who = f"{self.process} (process {self.pid} on {self.host})"
        else:
            who = self.process
        what = {
            "stopped": "is stopped (SIGSTOP, or a debugger)",
            "silent": "has no heartbeat",
            "hangs": "hangs",
        }[self.how]
        return f"{who} {what} for {self.seconds:.0f} s{f' in `{self.phase}`' if self.phase else ''}{self.note}"

    def about(self) -> dict[str, Any]:
        """The trouble as status.json has it."""
        left_out = ("rank", "blocks", "note", "here")
        about = {name: value for name, value in asdict(self).items() if name not in left_out}
        return about | {"seconds": round(self.seconds), "stack": self.stack[:SHORT]}


@dataclass
class Seen:
    """The latest pulse of a rank, and for how long it has not changed."""

    pulse: dict[str, Any]
    quiet_s: float = 0.0

    @property
    def age_s(self) -> float:
        return self.pulse["age_s"] + self.quiet_s


def behind(ranks: list[Seen]) -> list[Seen]:
    """Those that the others wait for."""
    first = min(one.pulse["entered"] for one in ranks)
    late = [one for one in ranks if one.pulse["entered"] == first]
    if len(late) == len(ranks):
        late = [one for one in ranks if not one.pulse.get("meets")]
    return late or ranks


def of_rank(one: Seen, how: str, seconds: float, note: str = "") -> Trouble:
    pulse = one.pulse
    told = how not in ("stopped", "silent")
    more = {"blocks": True, "note": note, "stack": tuple(pulse.get("stack", ())) if told else ()}
    return _trouble(one, how, f"rank {pulse['rank']}", pulse["pid"], seconds, **more)


def of_child(one: Seen, child: Mapping[str, Any], how: str, seconds: float) -> Trouble:
    """The trouble of a process that a rank has started."""
    waits = one.pulse["waits"]
    blocks = bool(waits) and child["name"].startswith(waits["whom"])
    note = f"; rank {one.pulse['rank']} waits for it" if blocks else ""
    if how == "hangs" and child["pid"] and here(one.pulse):
        note += "".join(
            f"; its process {pid} is stopped" for pid in work_below(child["pid"]).stopped
        )
    return _trouble(one, how, child["name"], child["pid"], seconds, blocks=blocks, note=note)


def _trouble(
    one: Seen, how: str, process: str, pid: int | None, seconds: float, **more: Any
) -> Trouble:
    host, phase, rank = (one.pulse[name] for name in ("host", "phase", "rank"))
    return Trouble(how, process, pid, host, phase, seconds, rank, **more, here=here(one.pulse))


def here(pulse: Mapping[str, Any]) -> bool:
    """Whether the rank is a process that is seen from here: not in another container, nor on
    another machine.
    """
    return bool(pulse["host"] == platform.node() and birth_of(pulse["pid"]) == pulse["birth"])


def collective_s(hang_timeout_s: float, sampler: SamplerSection) -> float:
    """torch's own limit: longer than any rank may be late, even where nobody watches. Rank 0 tells
    the others every now and then to wait on; in a sync they wait for three answers of the engines,
    and first for their start.
    """
    engines_s = sampler.start_timeout_s + 3 * sampler.request_timeout_s
    return max(hang_timeout_s, engines_s) + 2 * MARGIN_S


def timeouts(run: RunSection, sampler: SamplerSection, reward: RewardSection) -> str:
    """The timeouts of hangs, as the console prints them."""
    return (
        f"the run ends after {run.hang_timeout_s:g} s without progress; an engine has "
        f"{sampler.start_timeout_s:g} s to start and {sampler.request_timeout_s:g} s to answer, a "
        f"reward {reward.timeout_s:g} s"
    )
