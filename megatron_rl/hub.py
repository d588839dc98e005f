"""Repositories of the Hugging Face hub by id: files and sizes, download into huggingface_hub's
cache, folder in that cache.

huggingface_hub reads HF_HOME, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE. Only its callers here
import it, since few commands need it.
"""

import logging
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

# first components of paths that are folders of this project, whether they exist yet or not
LOCAL = frozenset({"models", "runs", "data", "checkpoints"})
REFERENCE = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([A-Za-z0-9][\w./-]*))?", re.A)
# files of a model without its weights; never pickles (.bin, .pt) or code (.py)
SMALL_FILES = ("*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt")
WEIGHTS = ("*.safetensors",)
# in subfolders lie other formats, in consolidated.* the same weights under other names
IGNORED = {"model": ("*/*", "consolidated*", "*.bin.index.json"), "dataset": ()}
# it warns of every repository whose README.md has no metadata
logging.getLogger("huggingface_hub.repocard").setLevel(logging.ERROR)


class HubError(ValueError):
    """A repository or file that cannot be had from the hub; the text names the way out."""


class HubUnreachable(HubError):
    """No answer, or one that may be another later; what is in the cache can be used."""


@dataclass(frozen=True)
class HubId:
    """A repository, and a branch, tag or commit of it; None: the main branch."""

    name: str
    revision: str | None = None
    kind: str = "model"  # or dataset

    def __str__(self) -> str:
        if self.revision is None:
            return self.name
        return f"{self.name}@{self.revision}"


@dataclass(frozen=True)
class Listing:
    """A commit of a repository, and the sizes of its files in bytes."""

    id: HubId
    sizes: Mapping[str, int]

    def matching(self, patterns: Sequence[str]) -> dict[str, int]:
        from huggingface_hub.utils import filter_repo_objects

        ignored = list(IGNORED[self.id.kind])
        names = filter_repo_objects(
            self.sizes, allow_patterns=list(patterns), ignore_patterns=ignored
        )
        return {name: self.sizes[name] for name in names}


def parse(text: str, kind: str = "model") -> HubId | None:
    """Return the id that a text is, ORG/NAME or ORG/NAME@REVISION; None for a path."""
    found = REFERENCE.fullmatch(text)
    if found is None or Path(text).exists():
        return None
    first = text.partition("/")[0]
    if first in LOCAL or Path(first).is_dir():
        return None
    return HubId(found[1], found[2], kind)


def local_folder(text: str) -> Path:
    """Return the folder that a text names: itself, or that of an id in the cache. No network."""
    one = parse(text)
    folder = cached(one, ["config.json"]) if one else None
    return folder or Path(text)


def cache() -> Path:
    """Return the folder of the cache."""
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE)


def cached(one: HubId, patterns: Sequence[str]) -> Path | None:
    """Return the folder of an id in the cache, if all matching files are there. No network."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(local_files_only=True, **_arguments(one, patterns)))
    except (LocalEntryNotFoundError, HFValidationError):
        return None


def in_words(sizes: Collection[int]) -> str:
    """Describe a download by its number of files and their size."""
    nbytes = sum(sizes)
    if nbytes < 1e9:
        return f"{len(sizes)} files to download, {nbytes / 1e6:.1f} MB"
    return f"{len(sizes)} files to download, {nbytes / 1e9:.1f} GB"


def list_files(one: HubId) -> Listing:
    """Ask the hub for the commit of a revision, and for its files."""
    from huggingface_hub import HfApi, constants

    with _explained(one):
        api = HfApi()
        ask = api.model_info if one.kind == "model" else api.dataset_info
        limit_s = constants.HF_HUB_ETAG_TIMEOUT
        about = ask(one.name, revision=one.revision, files_metadata=True, timeout=limit_s)
        sizes = {file.rfilename: file.size or 0 for file in about.siblings or ()}
    return Listing(replace(one, revision=about.sha), sizes)


def download(one: HubId, patterns: Sequence[str]) -> Path:
    """Download the matching files that are not in the cache; return their folder.

    A lost connection continues where it was lost. A file gets its name when it is complete. If the
    hub does not answer, files in the cache are used.
    """
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.utils import disable_progress_bars

    if not sys.stderr.isatty() and constants.HF_HUB_DISABLE_PROGRESS_BARS is None:
        disable_progress_bars()
    try:
        with _explained(one):
            return Path(snapshot_download(**_arguments(one, patterns)))
    except HubUnreachable:
        folder = cached(one, patterns)
        if folder is None:
            raise
        return folder


def _arguments(one: HubId, patterns: Sequence[str]) -> dict[str, Any]:
    return {
        "repo_id": one.name,
        "revision": one.revision,
        "repo_type": one.kind,
        "allow_patterns": list(patterns),
        "ignore_patterns": list(IGNORED[one.kind]),
    }


@contextmanager
def _explained(one: HubId) -> Iterator[None]:
    """Raise HubError, with the way out, for what huggingface_hub raises."""
    from huggingface_hub import errors

    try:
        yield
    except errors.LocalEntryNotFoundError as error:  # its cause is what the hub answered
        raise _refusal(one, error.__cause__ or error) from None
    except (
        errors.HTTPError,
        errors.OfflineModeIsEnabled,
        errors.HFValidationError,
        OSError,
    ) as error:
        raise _refusal(one, error) from None


def _refusal(one: HubId, error: BaseException) -> HubError:
    from huggingface_hub import constants, errors

    where = constants.ENDPOINT
    status = getattr(getattr(error, "response", None), "status_code", 0)
    if isinstance(error, errors.GatedRepoError):
        page = f"{where}/{'datasets/' if one.kind == 'dataset' else ''}{one.name}"
        return HubError(
            f"{one} is gated; accept its terms at {page}, then run `hf auth login` or set HF_TOKEN"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return HubError(
            f"{where} shows no {one.kind} {one.name!r} to this user; correct the name, name a "
            "folder that exists, or set HF_TOKEN for a private one"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return HubError(
            f"{one.name} has no revision {one.revision!r}; name a branch, tag or commit"
        )
    if isinstance(error, errors.HFValidationError):
        return HubError(f"{one} is not a valid id; write ORG/NAME or ORG/NAME@REVISION")
    if isinstance(error, errors.OfflineModeIsEnabled):
        return HubUnreachable(
            f"{one} is not complete in the cache {constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE is "
            "set; run `megatron-rl fetch RECIPE` on a machine with a network and this cache"
        )
    if status in (401, 403):
        return HubError(
            f"{where} refuses access to {one} (status {status}); renew HF_TOKEN or run "
            "`hf auth login`"
        )
    if status == 429:
        return HubUnreachable(
            f"{where} limits the rate of requests (status 429); try again later, with HF_TOKEN for "
            "a higher limit"
        )
    if status:
        return HubUnreachable(f"{where} answered with status {status} for {one}; try again later")
    if isinstance(error, OSError) and error.errno:
        return HubError(
            f"{one} cannot be written to the cache {constants.HF_HUB_CACHE} ({error.strerror}); "
            "free space, or set HF_HOME to another folder"
        )
    reason = str(error).partition("\n")[0] or type(error).__name__
    return HubUnreachable(
        f"{one} was not received from {where} ({reason}); try again. "
        "On a slow network raise HF_HUB_DOWNLOAD_TIMEOUT and HF_HUB_ETAG_TIMEOUT (10 seconds). "
        "Without a network, run `megatron-rl fetch RECIPE` where there is one"
    )
