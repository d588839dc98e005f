"""Readiness of an engine: whether updates or sleep make it refuse a request, and why; the version
of its workers.

A request is refused, with the reason, during an update that is not double-buffered, while weights
or cache are asleep (a colocated engine sleeps while the learner works), and after its weights were
discarded or incompletely updated, until the next complete sync; also if it names another version.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

import msgspec

from megatron_rl.weight_sync.manifest import NO_VERSION

# vLLM's names of the parts that can sleep
WEIGHTS = "weights"
CACHE = "kv_cache"
TAGS = (WEIGHTS, CACHE)
# engine argument: report the experts of every token read
KEEPS_EXPERTS = "keeps_experts"
LARGEST_ID = (1 << 31) - 1  # of versions and tokens
DISCARDS_WEIGHTS = 2  # vLLM's level of sleep that keeps no copy


@dataclass(frozen=True)
class SyncState:
    """Version that a worker serves, and the cost of its last update. A sampler validates servers'
    replies against these bounds.
    """

    policy_version: Annotated[int, msgspec.Meta(ge=NO_VERSION, le=LARGEST_ID)]
    incomplete: bool  # loading failed in the middle: the weights are of no version
    verify_s: float
    load_s: float  # seconds to make the new weights live: a swap, or loading in place
    nbytes: int
    build_s: float = 0.0  # seconds to pack them beside the live ones


NOTHING_LOADED = SyncState(NO_VERSION, False, 0.0, 0.0, 0)


@dataclass
class Readiness:
    policy_version: int = NO_VERSION
    incomplete: bool = False  # an update stopped in the middle: the weights are of no version
    updating: bool = False
    beside: bool = False  # the update is double-buffered: the current weights are still served
    discarded: bool = False  # weights were dropped in sleep, and no sync has completed since
    asleep: set[str] = field(default_factory=set)

    def refusal(self, wanted: int | None = None, or_newer: bool = False) -> str | None:
        """Return the reason to refuse a request now. `wanted`: the version that the caller
        expects.
        """
        if self.asleep:
            return f"the engine is asleep ({', '.join(sorted(self.asleep))}): wake it before generating"
        if self.incomplete:
            return (
                "the last weight update stopped half-way: the weights are of no version. Sync again"
            )
        if self.discarded:
            return "the weights were discarded in sleep and no sync has completed since. Sync before generating"
        if self.updating and not self.beside:
            return (
                "a weight update has begun and is not finished: the weights may be of two versions"
            )
        if (
            wanted is not None
            and wanted != self.policy_version
            and not (or_newer and wanted < self.policy_version)
        ):
            return f"the engine serves policy version {self.policy_version}, version {wanted} was announced last"
        return None

    def begin_update(self) -> None:
        if WEIGHTS in self.asleep:
            raise RuntimeError(
                "the engine's weights are asleep: wake them (tag 'weights') before a weight update"
            )
        self.updating = True
        self.beside = False

    def abandon_update(self, incomplete: bool) -> None:
        """End the update; the previous version is served again, unless its weights have been
        overwritten.
        """
        self.updating = False
        self.incomplete = incomplete

    def complete_update(self, version: int) -> None:
        self.updating = self.incomplete = self.discarded = False
        self.policy_version = version

    def fall_asleep(self, level: int) -> None:
        if self.updating:
            raise RuntimeError("a weight update has begun: finish it before the engine sleeps")
        self.asleep = set(TAGS)
        self.discarded = self.discarded or level >= DISCARDS_WEIGHTS

    def wake(self, tags: Sequence[str]) -> None:
        unknown = sorted(set(tags) - set(TAGS))
        if unknown:
            raise RuntimeError(
                f"nothing of the engine is called {unknown[0]!r}: its parts are {', '.join(TAGS)}"
            )
        # an engine that was restarted meanwhile has not slept
        if CACHE in self.asleep.intersection(tags) and self.updating:
            raise RuntimeError("a weight update has begun: finish it before the cache wakes")
        self.asleep -= set(tags)
