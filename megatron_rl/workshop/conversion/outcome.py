"""parity.json, beside the weights that a conversion has made: of what they were made, and how that was checked."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import xxhash

from megatron_rl.files import write_whole
from megatron_rl.models.table import TABLE
from megatron_rl.models.tensors import reuse_memory
from megatron_rl.models.weight_files import PARITY
from megatron_rl.workshop.conversion.progress import Progress
from megatron_rl.workshop.conversion.side_by_side import GoOn, shared_out, side_by_side
from megatron_rl.workshop.conversion.weights import Weights, content_digest, digest

WORST = 10
_VERSIONS = ("megatron-rl", "torch", "megatron-core", "safetensors", "transformers", "nvidia-modelopt")


@dataclass
class Seen:
    """What was noted while the files were written, of this attempt and those before it."""

    digests: dict[str, str] = field(default_factory=dict)  # of what went out
    made_of: dict[str, list[dict[str, str]]] = field(default_factory=dict)  # as in Weights
    errors: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, finished: Mapping[str, Any]) -> Seen:
        seen = cls()
        for about in finished.values():
            seen.digests |= about["digests"]
            seen.made_of |= about.get("made_of", {})
            seen.errors |= about.get("errors", {})
        return seen

    def inputs(self, paths: Sequence[Path]) -> list[dict[str, Any]]:
        """Each with the digest of what was read of it; what passes as it is was read as it was written."""
        read: list[dict[str, str]] = [{} for _ in paths]
        for name, one in self.digests.items():
            for held, made_of in zip(read, self.made_of.get(name, [{name: one}] * len(paths)), strict=True):
                held |= made_of
        return [{"path": str(path), "content": content_digest(one)} for path, one in zip(paths, read, strict=True)]


@cache
def mapping_version() -> str:
    """Of the mapping table: two conversions with the same one name and cut weights alike."""
    return xxhash.xxh3_64_hexdigest(repr(TABLE).encode())


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in _VERSIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def read_back(output: Weights, expected: Mapping[str, str], where: Path) -> None:
    """Every tensor of the finished files once more, by the way that its readers go; ValueError names the first."""
    missing = sorted(expected.keys() - output.specs.keys())
    if missing:
        raise ValueError(f"{where} lacks {missing[0]} after it was written")
    with Progress("checked", output.nbytes) as progress:

        def check(names: list[str], go_on: GoOn) -> None:
            reuse_memory()
            get = output.open()
            for name in names:
                go_on()
                tensor = get(name)
                if name in expected and digest(tensor) != expected[name]:
                    raise ValueError(f"{where}: {name} reads otherwise than it was written; is the disk sound?")
                progress.add(tensor.nbytes)
                del tensor  # before the next one is read

        side_by_side(check, shared_out({name: spec.nbytes for name, spec in output.specs.items()}))


def write_outcome(folder: Path, command: str, inputs: Sequence[Path], seen: Seen, **more: Any) -> None:
    """The cheap half of a proof; `verify` is the other."""
    worst = sorted(seen.errors.items(), key=lambda item: -item[1])[:WORST]
    said = {
        "made_by": command,
        "made_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "verdict": "every tensor reads as it was written",
        "inputs": seen.inputs(inputs),
        "output": {"content": content_digest(seen.digests), "tensors": len(seen.digests)},
        **({"worst_relative_errors": {name: float(f"{error:.4g}") for name, error in worst}} if worst else {}),
        "mapping": mapping_version(),
        "versions": versions(),
        **more,
    }
    write_whole(folder / PARITY, json.dumps(said, indent=1) + "\n")
