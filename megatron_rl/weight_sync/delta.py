"""Patches between two versions of a tensor's bytes: creation and application; a sender's last
bytes, and its chain of versions.

A patch is the distance of every changed byte from the one before it (16 bits each), then the new
bytes.
"""

from dataclasses import dataclass, field

import numpy as np

from megatron_rl.weight_sync.manifest import BYTES_PER_CHANGE

GAP = np.dtype("<u2")
LONGEST_GAP = np.iinfo(GAP).max
WORD = np.dtype("u8")


@dataclass(frozen=True)
class Patch:
    data: np.ndarray  # uint8
    changes: int  # bytes written, some of them unchanged, to bridge a long gap
    changed_values: int


def changed_bytes(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Return the positions at which two byte arrays of equal length differ; words are compared
    first.
    """
    words = len(old) // WORD.itemsize * WORD.itemsize
    differ = np.flatnonzero(old[:words].view(WORD) != new[:words].view(WORD))
    inside = (differ[:, None] * WORD.itemsize + np.arange(WORD.itemsize)).reshape(-1)
    tail = np.arange(words, len(old))
    candidates = np.concatenate((inside, tail))
    return candidates[old[candidates] != new[candidates]]


def make_patch(old: np.ndarray, new: np.ndarray, itemsize: int) -> Patch | None:
    """Return the patch that turns `old` into `new`; None if the full content is no longer than the
    patch.
    """
    positions = changed_bytes(old, new)
    if itemsize == 1:
        changed_values = len(positions)
    else:
        changed_values = len(np.unique(positions // itemsize))
    positions = _bridged(positions)
    if len(positions) * BYTES_PER_CHANGE >= len(new):
        return None
    gaps = np.diff(positions, prepend=0).astype(GAP)
    return Patch(
        np.concatenate((gaps.view(np.uint8), new[positions])), len(positions), changed_values
    )


def apply_patch(target: np.ndarray, data: np.ndarray, changes: int) -> None:
    """Apply a patch in place; ValueError if it writes out of bounds."""
    gaps = data[: changes * GAP.itemsize]
    values = data[changes * GAP.itemsize :]
    # a copy, because patches may be unaligned
    positions = np.cumsum(np.frombuffer(gaps.tobytes(), GAP), dtype=np.int64)
    if changes and positions[-1] >= len(target):
        raise ValueError(f"a patch writes at {positions[-1]} of {len(target)} bytes")
    target[positions] = values


def _bridged(positions: np.ndarray) -> np.ndarray:
    """Return the positions, with additional ones between two that are too far apart for one gap."""
    gaps = np.diff(positions, prepend=0)
    bridges = [
        np.arange(positions[i] - gaps[i] + LONGEST_GAP, positions[i], LONGEST_GAP)
        for i in np.flatnonzero(gaps > LONGEST_GAP)
    ]
    if bridges:
        return np.sort(np.concatenate((positions, *bridges)))
    return positions


@dataclass
class Sent:
    """Bytes that one writer sent last, by tensor and start of a part: the base of patches."""

    # of the last version: bytes with a previous version to compare with, and bytes that differ
    values: int = 0
    changed: int = 0
    _parts: dict[tuple[str, int], np.ndarray] = field(default_factory=dict)

    def begin(self) -> None:
        self.values = self.changed = 0

    def exchange(self, part: tuple[str, int], data: np.ndarray, itemsize: int) -> Patch | None:
        """Store the part; return its patch, or None if it must be sent in full."""
        old = self._parts.get(part)
        if old is None or len(old) != len(data):
            self._parts[part] = data.copy()
            return None
        self.values += len(data) // itemsize
        patch = make_patch(old, data, itemsize)
        if patch is None:
            self.changed += int(np.any((old != data).reshape(-1, itemsize), axis=1).sum())
        else:
            self.changed += patch.changed_values
        old[:] = data
        return patch

    def forget(self) -> None:
        self._parts.clear()


@dataclass
class Lineage:
    """Last full version and the patches upon it: everything a receiver needs for the newest
    version.
    """

    full_every: int
    versions: list[int] = field(default_factory=list)

    @property
    def base(self) -> int | None:
        """Return the version that the next patch builds on; None if the next one must be full."""
        if 0 < len(self.versions) < self.full_every:
            return self.versions[-1]
        return None

    def add(self, version: int) -> None:
        if self.base is None:
            self.versions = []
        self.versions.append(version)
