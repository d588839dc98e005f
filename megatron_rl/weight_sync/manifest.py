"""Manifest of an update: names, shapes, dtypes, places, checksums, policy version of its tensors;
checks; sync errors.

Each writer (one per pipeline stage and expert rank) leaves one as JSON beside its bucket files. The
receiver joins them and compares the whole with what its engine expects before a single byte reaches
the live model.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import xxhash

from megatron_rl.models.tensors import TensorSpec

PROBLEMS_SHOWN = 8
NO_VERSION = -1  # policy version of an engine that holds its dummy weights: any version is newer
BYTES_PER_CHANGE = 3  # of a patch: 16 bits say where, 8 what


class WeightSyncError(RuntimeError):
    """An update that did not arrive. The engine still serves the version before it."""

    process = "the sampler's engine"
    hint = (
        "Check the room and the rights of sync.dir, and that all servers of a fleet run this "
        "version; sync.full_every=1 sends whole versions."
    )


class UpdateRefused(WeightSyncError):
    """By the sampler, as every rank of the learner knows."""


@dataclass(frozen=True)
class Part:
    """Rows (columns) of a tensor; most tensors have one part."""

    start: int
    length: int
    nbytes: int
    # of the content, not of its patch; covers the tensor's name, and where the part begins
    checksum: str
    # the file holds a patch with so many changes; None: it holds the content
    changes: int | None = None

    @property
    def stored_bytes(self) -> int:
        if self.changes is None:
            return self.nbytes
        return self.changes * BYTES_PER_CHANGE


@dataclass(frozen=True)
class TensorEntry:
    """A tensor and where it lies, part by part. Its fields are those of the JSON."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str  # relative to the manifest
    offset: int  # of the first part; the next ones follow
    dim: int  # that its parts divide
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
    checksum: str = ""  # of all the rest

    @property
    def nbytes(self) -> int:
        return sum(self.files.values())


def hashing(name: str, start: int = 0) -> xxhash.xxh3_64:
    """Hash of a part's bytes, which differs under another name and in another place."""
    return xxhash.xxh3_64(seed=xxhash.xxh3_64_intdigest(f"{name}:{start}".encode()))


def checksum(data: bytes | memoryview, name: str, start: int = 0) -> str:
    hashed = hashing(name, start)
    hashed.update(data)
    return hashed.hexdigest()


def encode(manifest: Manifest) -> bytes:
    """Return its JSON, sealed with a checksum of its own."""
    return msgspec.json.encode(replace(manifest, checksum=_own_checksum(manifest)))


def _own_checksum(manifest: Manifest) -> str:
    return checksum(msgspec.json.encode(replace(manifest, checksum="")), "manifest")


def read(path: Path) -> Manifest:
    """Return a manifest that is as its writer made it."""
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
    """Every tensor of a version by name; refuses disagreement and duplicates."""
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
    """Refuse another version than was announced, or one that is no newer than the engine's."""
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
    """Missing, unexpected, misshapen and mistyped tensors, all of them at once, each by name."""
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
