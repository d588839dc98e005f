"""`megatron-rl push`: the exported model of a run, with a model card, to a repository of the Hugging
Face hub, in one commit.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from yaml import YAMLError

from megatron_rl import hub
from megatron_rl.config import ConfigError, recorded_config
from megatron_rl.config.plain_yaml import read_yaml, redact, write_yaml
from megatron_rl.files import read_json, write_atomic
from megatron_rl.models.weight_files import INDEX, companions, refuse_links_out, weight_files
from megatron_rl.tracking.metrics_file import read_metrics
from megatron_rl.tracking.run_dir import RunDir

CARD = "README.md"
# of the metrics, those that describe the model
SHOWN = ("eval/*", "reward/sampler_mean", "rollout/response_tokens_mean", "rollout_corr/k3_kl")
LICENSE = ("license", "license_name", "license_link")
CACHED = re.compile(r"/(?:models|datasets)--([^/]+?)--([^/]+)/snapshots/([0-9a-f]{40})(?:/|$)")


def push(path: Path, name: str, private: bool, dry_run: bool) -> str:
    """Upload the model of the run in `path`; return the address of the commit, or of a dry run the
    card and the files.
    """
    from huggingface_hub import get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise ConfigError(f"{name}: {error}") from None
    if "/" not in name:
        raise ConfigError(f"{name}: expected the name of a repository, such as org/{name}")
    run = RunDir(path)
    if not run.config.is_file():
        raise ConfigError(f"{path}: no run, {run.config.name} is missing; name a run directory")
    files = _files(run)
    card = model_card(run, name)
    if dry_run:
        sizes = [f"{file}  {(run.model / file).stat().st_size:,} bytes" for file in files]
        return "\n".join([card, f"files of {run.model}:", *sizes, f"{CARD}  the card above"])
    if get_token() is None:
        raise ConfigError("no token for the hub: run `hf auth login`, or set HF_TOKEN")
    write_atomic(run.model / CARD, card)
    with _explained(name):
        return _upload(run.model, [*files, CARD], name, private)


def _files(run: RunDir) -> list[str]:
    """Names of the model's files, except the card."""
    try:
        weights = weight_files(run.model)
        weights += [INDEX] * (run.model / INDEX).is_file()
        refuse_links_out(run.model, weights)
        return [*weights, *(name for name in companions(run.model) if name != CARD)]
    except FileNotFoundError:
        raise ConfigError(
            f"{run.model}: no complete exported model; `python tools/convert.py export {run.path} "
            f"{run.model}` writes it from the newest checkpoint. Remove an incomplete folder first"
        ) from None
    except ValueError as error:
        raise ConfigError(str(error)) from None


def model_card(run: RunDir, name: str) -> str:
    """Model card in Markdown, with the hub's metadata as YAML in front."""
    from huggingface_hub import ModelCardData

    config = recorded_config(run.config)
    base = _origin(config.model.path, "model")
    data = {source: _origin(source, "dataset") for source in config.data.sources("train")}
    metadata = ModelCardData(
        base_model=base and base[0],
        datasets=sorted({one[0] for one in data.values() if one}) or None,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["megatron-rl", "reinforcement-learning", config.loss.name.value],
        **_license(run.model / CARD),
    )
    env = read_json(run.env) if run.env.is_file() else {}
    lines = [
        "---",
        metadata.to_yaml(),
        "---",
        "",
        f"# {name.partition('/')[2]}",
        "",
        "A language model trained by reinforcement learning with megatron-rl.",
        "",
        f"- Base model: {_described(base, config.model.path)}",
        *(f"- Training data: {_described(one, source)}" for source, one in data.items()),
        f"- Code: {_code(env)}",
        "",
        "## Metrics",
        "",
        *_metrics(run),
        "",
        "## Recipe",
        "",
        "~~~~yaml",
        write_yaml(redact(read_yaml(run.config.read_text()))).rstrip(),
        "~~~~",
        "",
    ]
    return "\n".join(lines)


def _license(card: Path) -> dict[str, str]:
    """License by the base model's card, which an export copies, or by the card pushed before."""
    from huggingface_hub import metadata_load

    with suppress(OSError, ValueError, YAMLError):
        data = metadata_load(card) or {}
        return {key: data[key] for key in LICENSE if isinstance(data.get(key), str)}
    return {}


def _origin(path: str, kind: str) -> tuple[str, str] | None:
    """Repository on the hub and commit of an id, or of a path in the hub's cache."""
    if one := hub.parse(path, kind):
        return one.name, one.revision if one.revision and one.pinned else "unknown"
    if found := CACHED.search(str(Path(path).resolve())):
        return f"{found[1]}/{found[2]}", found[3]
    return None


def _described(origin: tuple[str, str] | None, path: str) -> str:
    if origin is None:
        return f"`{path}`, local, commit unknown"
    return f"`{origin[0]}`, commit {origin[1]}"


def _code(env: Mapping[str, Any]) -> str:
    version = env.get("versions", {}).get("megatron-rl", "of unknown version")
    git = env.get("git") or {"commit": "unknown"}
    return (
        f"megatron-rl {version}, commit {git['commit']}{' (modified)' * git.get('modified', False)}"
    )


def _metrics(run: RunDir) -> list[str]:
    """Table of the last value of each metric that describes the model."""
    last: dict[str, tuple[int, float]] = {}
    for line in read_metrics(run.metrics) if run.metrics.is_file() else ():
        for name, value in line.items():
            if any(fnmatch(name, pattern) for pattern in SHOWN):
                last[name] = int(line["progress/step"]), value
    if not last:
        return ["None were recorded."]
    rows = [f"| `{name}` | {value:.4g} | {step} |" for name, (step, value) in sorted(last.items())]
    return ["| metric | last value | step |", "|---|---|---|", *rows]


def _upload(folder: Path, files: list[str], name: str, private: bool) -> str:
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    api = HfApi()
    api.create_repo(name, private=private or None, exist_ok=True)
    about = api.model_info(name)
    if private and not about.private:
        raise ConfigError(
            f"--private: {name} exists and is public; make it private in its settings, or name "
            "another repository"
        )
    # weights of a model that was pushed before, in other files
    there = [file.rfilename for file in about.siblings or ()]
    stale = [one for one in there if one.endswith(".safetensors") or one == INDEX]
    adds = [CommitOperationAdd(file, folder / file) for file in files]
    deletes = [CommitOperationDelete(one) for one in stale if one not in files]
    # one commit: a reader never sees some files of two models
    done = api.create_commit(
        name, [*adds, *deletes], commit_message=f"Model of the run {folder.parent.resolve().name}"
    )
    return done.commit_url


@contextmanager
def _explained(name: str) -> Iterator[None]:
    """Raise ConfigError, with the way out, for what huggingface_hub raises."""
    from huggingface_hub.errors import HTTPError

    try:
        yield
    except (HTTPError, OSError, RuntimeError, ValueError) as error:
        # a RuntimeError of an upload has the response in its cause
        cause = error.__cause__ if isinstance(error, RuntimeError) else error
        status = getattr(getattr(cause, "response", None), "status_code", 0)
        reason = str(cause).strip().partition("\n")[0]
        if status == 401:
            hint = "the token is not valid; run `hf auth login`, or renew HF_TOKEN"
        elif status == 403:
            hint = (
                f"the token may not write to {name}; use one that may, or name another repository"
            )
        elif status:
            hint = "run the command again; complete files are not sent twice"
        else:
            hint = "check the network and HF_ENDPOINT, and run the command again"
        raise ConfigError(
            f"push to {name} failed (status {status or 'none'}: {reason}); {hint}"
        ) from None
