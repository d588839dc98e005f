"""Manifest of an update: names, shapes, dtypes, locations, checksums and policy version of its
tensors; validation; sync errors.

Each writer (one per pipeline stage and expert rank) leaves one as JSON beside its bucket files. The
receiver joins them and compares the complete version with the tensors that its engine expects
before a single byte reaches the live model.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import xxhash

from megatron_rl.models.tensors import TensorSpec

PROBLEMS_SHOWN = 8
NO_VERSION = -1  # policy version of an engine that holds its dummy weights: any version is newer
BYTES_PER_CHANGE = 3  # of a patch: 16 bits of distance, 8 of content


class WeightSyncError(RuntimeError):
    """Failed update. The engine still serves the previous version."""

    process = "the sampler's engine"
    hint = (
        "Check the free space and the permissions of sync.dir, and that all servers of a fleet "
        "run this version; sync.full_every=1 sends complete versions."
    )


class UpdateRefused(WeightSyncError):
    """The sampler refused the update; raised on every rank of the learner."""


@dataclass(frozen=True)
class Part:
    """Rows (columns) of a tensor; most tensors have one part."""

    start: int
    length: int
    nbytes: int
    # of the content, not of its patch; includes the tensor's name and the start of the part
    checksum: str
    # number of changes if the file holds a patch; None: it holds the content
    changes: int | None = None

    @property
    def stored_bytes(self) -> int:
        if self.changes is None:
            return self.nbytes
        return self.changes * BYTES_PER_CHANGE


@dataclass(frozen=True)
class TensorEntry:
    """Location of a tensor, part by part. Its fields are those of the JSON."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str  # relative to the manifest
    offset: int  # of the first part; the next ones follow
    dim: int  # dimension along which it is partitioned
    parts: tuple[Part, ...]

    @property
    def spec(self) -> TensorSpec:
        return TensorSpec(self.name, self.dtype, self.shape)


@dataclass(frozen=True)
class Manifest:
    policy_version: int
    format: str  # quantization.format of the tensors
    files: dict[str, int]  # file name -> bytes
    tensors: tuple[TensorEntry, ...]
    base: int | None = None  # the policy version that patches build on
    checksum: str = ""  # of all other fields

    @property
    def nbytes(self) -> int:
        return sum(self.files.values())


def hashing(name: str, start: int = 0) -> xxhash.xxh3_64:
    """Return the hash state of a part's bytes, seeded with its name and position."""
    return xxhash.xxh3_64(seed=xxhash.xxh3_64_intdigest(f"{name}:{start}".encode()))


def checksum(data: bytes | memoryview, name: str, start: int = 0) -> str:
    hashed = hashing(name, start)
    hashed.update(data)
    return hashed.hexdigest()


def encode(manifest: Manifest) -> bytes:
    """Return the JSON, with a checksum of its own."""
    return msgspec.json.encode(replace(manifest, checksum=_own_checksum(manifest)))


def _own_checksum(manifest: Manifest) -> str:
    return checksum(msgspec.json.encode(replace(manifest, checksum="")), "manifest")


def read(path: Path) -> Manifest:
    """Read a manifest and verify its checksum."""
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
    except FileNotFoundError:
        raise WeightSyncError(
            f"the manifest {path} is missing: its writer did not finish"
        ) from None
    except (OSError, msgspec.DecodeError) as error:
        raise WeightSyncError(f"the manifest {path} is unreadable: {error}") from error
    if manifest.checksum != _own_checksum(manifest):
        raise WeightSyncError(f"the manifest {path} is corrupt: it does not match its checksum")
    return manifest


def join(manifests: Sequence[Manifest]) -> dict[str, TensorEntry]:
    """Return every tensor of a version by name; refuse disagreement and duplicates."""
    versions = {manifest.policy_version for manifest in manifests}
    formats = {manifest.format for manifest in manifests}
    bases = {manifest.base for manifest in manifests}
    if len(versions) > 1 or len(formats) > 1 or len(bases) > 1:
        raise WeightSyncError(
            f"writers disagree: policy versions {sorted(versions)}, formats {sorted(formats)}, "
            f"patches of versions {sorted(map(str, bases))}"
        )
    entries: dict[str, TensorEntry] = {}
    for manifest in manifests:
        for entry in manifest.tensors:
            if entry.name in entries:
                raise WeightSyncError(f"duplicate tensor {entry.name}: sent twice in one update")
            entries[entry.name] = entry
    return entries


def verify_version(policy_version: int, current: int, announced: int) -> None:
    """Refuse a version other than the announced one, or not newer than the engine's."""
    if policy_version != announced:
        raise WeightSyncError(
            f"the manifest carries policy version {policy_version}, version {announced} was "
            "announced"
        )
    if policy_version <= current:
        raise WeightSyncError(
            f"stale policy version {policy_version}: the engine already serves version {current}"
        )


def verify_tensors(
    tensors: Iterable[TensorEntry | TensorSpec], expected: Mapping[str, TensorSpec]
) -> None:
    """Raise for missing, unexpected, misshapen and mistyped tensors, all of them at once, by
    name.
    """
    problems: list[str] = []
    seen: set[str] = set()
    for sent in tensors:
        seen.add(sent.name)
        want = expected.get(sent.name)
        if want is None:
            problems.append(f"unexpected tensor {sent.name}")
            continue
        if sent.shape != want.shape:
            problems.append(
                f"misshapen tensor {sent.name}: shape {sent.shape}, the engine expects {want.shape}"
            )
        if sent.dtype != want.dtype:
            problems.append(
                f"mistyped tensor {sent.name}: {sent.dtype}, the engine expects {want.dtype}"
            )
    problems += [f"missing tensor {name}" for name in expected if name not in seen]
    if problems:
        raise WeightSyncError("; ".join(problems[:PROBLEMS_SHOWN]))
