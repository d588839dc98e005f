"""A stored model answers without a run: the engine, quantizers and checked update that a run has, and no learner."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from megatron_rl.config.load import from_base, recorded
from megatron_rl.config.schema import Config, Format
from megatron_rl.models.model import read_hf_config
from megatron_rl.processes.process import raise_interrupt
from megatron_rl.processes.scratch import entered
from megatron_rl.runs.run_dir import RunDir
from megatron_rl.sampler.choose import make_sampler
from megatron_rl.sampler.engine_settings import EngineSettings
from megatron_rl.sampler.protocol import Sampler
from megatron_rl.weight_sync.push import WeightSync
from megatron_rl.workshop.evaluation.stored_model import StoredModel, StoredWeights

FORMATS = {"bf16": Format.none, "int8": Format.int8, "fp8": Format.fp8, "fp8_block": Format.fp8_block}
PROMPT_TOKENS, ANSWER_TOKENS = 2048, 8192  # of a model that comes from no run, where its context is long enough
# what a run shares with other processes and machines, or measures in its learner
ALONE = (
    "run.stop=null", "checkpoint.best=null", "model.init=pretrained", "reward.overlong_buffer=0",
    "rollout={source: sampler, samples_per_prompt: 2, dynamic_sampling: false}",
    "sampler.fleet={replicas: 0, servers: 0, addresses: [], formats: []}", "sampler.devices=null", "sampler.sleep=none",
    "sync={transport: file, dir: null, every: 1, full_every: 1, probe_layers: false}", "eval.every=1",
    "quantization={smoothing: null, kv_cache: none}",
)  # fmt: skip


def settings(run: Path | None, stored: StoredModel, format: str, overrides: Sequence[str] = ()) -> Config:
    """The run's configuration, or the defaults, as far as they say how to sample and to score."""
    base: dict[str, Any] = recorded(RunDir(run).config) if run else {"rollout": _lengths(stored.folder)}
    for unused in ("correction", "advantage", "loss", "learner", "optim"):
        base.pop(unused, None)
    named = [f"model.path={stored.folder}", f"quantization.format={FORMATS[format].value}"]
    return from_base(base, [*ALONE, *named, *overrides])


def _lengths(folder: Path) -> dict[str, int]:
    context = int(read_hf_config(folder, key="MODEL").get("max_position_embeddings") or PROMPT_TOKENS + ANSWER_TOKENS)
    prompt = min(PROMPT_TOKENS, context // 4)
    return {"max_prompt_tokens": prompt, "max_response_tokens": min(ANSWER_TOKENS, context - prompt)}


@contextmanager
def served(
    config: Config, stored: StoredModel, note: Callable[[str], None], log_dir: Path | None = None
) -> Iterator[Sampler]:
    """An engine, or a fleet, that holds the model's weights in the format of the configuration."""
    signal.signal(signal.SIGTERM, raise_interrupt)  # so that what was started ends with its owner's last words
    weights = StoredWeights(stored)
    with entered():
        logs = log_dir or Path(tempfile.gettempdir())
        sampler = make_sampler(EngineSettings.from_config(config), stored.folder, logs, note)
        with closing(sampler):
            sampler.launch()
            sync = WeightSync.from_config(weights, sampler, config)
            with closing(sync):  # until the end: an engine that dies reads its weights again
                sync.push(0)
                yield sampler
