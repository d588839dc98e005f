"""`megatron-rl push`: the exported model of a run, with a model card, to a repository of the Hugging
Face hub, in one commit.
"""

from pathlib import Path

from jinja2 import Template

from megatron_rl import hub
from megatron_rl.config import ConfigError, recorded_config
from megatron_rl.config.plain_yaml import read_yaml, redact, write_yaml
from megatron_rl.files import read_json, write_atomic
from megatron_rl.models.weight_files import INDEX, companions, refuse_links_out, weight_files
from megatron_rl.tracking.metrics_file import read_metrics
from megatron_rl.tracking.run_dir import RunDir

CARD = "README.md"
# of the metrics, those that describe the model
SHOWN = ("eval/", "reward/sampler_mean", "rollout/response_tokens_mean", "rollout_corr/k3_kl")
TEMPLATE = Template("""\
---
{{ metadata }}
---

# {{ title }}

A language model trained by reinforcement learning with megatron-rl.

- Base model: `{{ config.model.path }}`
{%- for source in config.data.sources("train") %}
- Training data: `{{ source }}`
{%- endfor %}
- Code: megatron-rl {{ env.versions["megatron-rl"] }}, commit {{ env.git.commit or "unknown" }}
{%- if env.git.modified %}, modified{% endif %}

## Metrics

| metric | last value | step |
|---|---|---|
{%- for name, (value, step) in metrics %}
| `{{ name }}` | {{ "%.4g" | format(value) }} | {{ step }} |
{%- endfor %}

## Recipe

~~~~yaml
{{ recipe }}~~~~
""")


def push(path: Path, name: str, private: bool, dry_run: bool) -> str:
    """Upload the model of the run in `path`; return the address of the commit, or of a dry run the
    card and the files.
    """
    from huggingface_hub import get_token
    from huggingface_hub.errors import HTTPError

    one = hub.REFERENCE.fullmatch(name)
    if one is None or one[2]:
        raise ConfigError(f"{name}: expected the name of a repository, such as org/name")
    run = RunDir(path)
    files = _files(run)
    card = model_card(run, name)
    if dry_run:
        return "\n".join([card, f"files of {run.model}:", *files])
    if get_token() is None:
        raise ConfigError("no token for the hub: run `hf auth login`, or set HF_TOKEN")
    write_atomic(run.model / CARD, card)
    try:
        return _upload(run, files, name, private)
    except (HTTPError, OSError, RuntimeError, ValueError) as error:
        # a RuntimeError of an upload has the response in its cause
        cause = error.__cause__ or error
        reason = " ".join(str(cause).split())
        status = getattr(getattr(cause, "response", None), "status_code", None)
        hint = "check the network and HF_ENDPOINT, and run the command again; files are sent once"
        if status in (401, 403):
            hint = f"use a token that may write to {name}: run `hf auth login`, or set HF_TOKEN"
        raise ConfigError(f"push to {name} failed (status {status}): {reason}; {hint}") from None


def _files(run: RunDir) -> list[str]:
    """Names of the model's files and of the card."""
    try:
        weights = weight_files(run.model)
        refuse_links_out(run.model, weights)
        names = {CARD, *weights, *companions(run.model)}
    except (FileNotFoundError, ValueError) as error:
        raise ConfigError(
            f"no complete exported model ({error}); `python tools/convert.py export {run.path} "
            f"{run.model}` writes it from the newest checkpoint, if no folder is there"
        ) from None
    if (run.model / INDEX).is_file():
        names.add(INDEX)
    return sorted(names)


def model_card(run: RunDir, name: str) -> str:
    """Model card in Markdown, with the hub's metadata as YAML in front."""
    from huggingface_hub import ModelCardData

    config = recorded_config(run.config)
    base = hub.parse(config.model.path)
    data = [hub.parse(source, "dataset") for source in config.data.sources("train")]
    metadata = ModelCardData(
        base_model=base.name if base else None,
        datasets=[one.name for one in data if one] or None,
        library_name="transformers",
        tags=["megatron-rl", "reinforcement-learning", str(config.loss.name)],
    )
    metrics = {
        metric: (value, int(line["progress/step"]))
        for line in read_metrics(run.metrics)
        for metric, value in line.items()
        if metric.startswith(SHOWN)
    }
    return TEMPLATE.render(
        metadata=metadata.to_yaml(),
        title=Path(name).name,
        config=config,
        env=read_json(run.env),
        metrics=sorted(metrics.items()),
        recipe=write_yaml(redact(read_yaml(run.config.read_text()))),
    )


def _upload(run: RunDir, files: list[str], name: str, private: bool) -> str:
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
    there = {one.rfilename for one in about.siblings or ()} - {*files}
    stale = [one for one in there if one.endswith((".safetensors", INDEX))]
    # one commit: a reader never sees some files of two models
    done = api.create_commit(
        name,
        [
            *(CommitOperationAdd(file, run.model / file) for file in files),
            *map(CommitOperationDelete, stale),
        ],
        commit_message=f"Model of the run {run.path.name}",
    )
    return done.commit_url
