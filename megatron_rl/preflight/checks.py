"""Everything that can be known to be wrong before an engine starts, found in seconds and named by key."""

from __future__ import annotations

import ast
import difflib
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path

from megatron_rl.config import ConfigError
from megatron_rl.config import fleet as fleet_config
from megatron_rl.config.correction_rules import SUPERVISED
from megatron_rl.config.schema import (
    Config,
    Device,
    Estimator,
    Format,
    Fp8,
    ModelInit,
    RolloutSection,
    RolloutSource,
    Transport,
)
from megatron_rl.models.model import read_hf_config
from megatron_rl.models.shape import ModelShape
from megatron_rl.preflight.engine import engine_problems
from megatron_rl.preflight.machine import Machine, detect
from megatron_rl.preflight.sync_plan import config_problems
from megatron_rl.quantization.formats import format_problem
from megatron_rl.rewards.functions import resolve
from megatron_rl.runs.wandb_log import resolve_mode

# what the sampler decides itself; `sampler.vllm` may set anything else
OWNED_ARGUMENTS = frozenset(
    {
        "model", "quantization", "load_format", "logprobs_mode", "skip_tokenizer_init", "generation_config",
        "tensor_parallel_size", "weight_transfer_config", "worker_extension_cls", "max_num_seqs",
        "api_key", "host", "port", "uds", "middleware", "tokens_only", "root_path",
    }
)  # fmt: skip


def check(config: Config) -> Machine:
    """Raises one ConfigError listing every problem found; returns the machine the run will use."""
    machine = detect(config.run.device)
    found: list[str] = []
    for rule in _RULES:
        try:
            found += rule(config, machine)
        except ConfigError as error:  # such as a missing model, without which the rest of its rule says nothing
            found.append(str(error))
    if found:
        raise ConfigError("\n".join(dict.fromkeys(found)))
    return machine


def _numbers(config: Config, machine: Machine) -> Iterator[str]:
    eval_tokens = 1 if config.eval.max_response_tokens is None else config.eval.max_response_tokens
    bounds: list[tuple[str, float, Callable[[float], bool], str]] = [
        ("run.seed", config.run.seed, lambda x: x >= 0, "0 or more"),
        ("run.steps", config.run.steps, lambda x: x >= 0, "0 or more"),
        ("rollout.prompts_per_step", config.rollout.prompts_per_step, lambda x: x >= 1, "1 or more"),
        ("rollout.samples_per_prompt", config.rollout.samples_per_prompt, lambda x: x >= 1, "1 or more"),
        ("rollout.max_prompt_tokens", config.rollout.max_prompt_tokens, lambda x: x >= 1, "1 or more"),
        ("rollout.max_response_tokens", config.rollout.max_response_tokens, lambda x: x >= 1, "1 or more"),
        ("rollout.max_gen_batches", config.rollout.max_gen_batches, lambda x: x >= 1, "1 or more"),
        ("rollout.temperature", config.rollout.temperature, lambda x: x > 0, "above 0 (greedy is for evaluation)"),
        ("sampler.tensor_parallel", config.sampler.tensor_parallel, lambda x: x >= 1, "1 or more"),
        ("sampler.max_sequences", config.sampler.max_sequences, lambda x: x >= 1, "1 or more"),
        ("sampler.memory_gib", config.sampler.memory_gib, lambda x: x > 0, "above 0"),
        ("quantization.smoothing_every", config.quantization.smoothing_every, lambda x: x >= 1, "1 or more"),
        ("sync.every", config.sync.every, lambda x: x >= 1, "1 or more"),
        ("sync.verify_every", config.sync.verify_every, lambda x: x >= 0, "0 or more"),
        ("sync.full_every", config.sync.full_every, lambda x: x >= 1, "1 or more"),
        ("sync.bucket_mib", config.sync.bucket_mib, lambda x: x >= 1, "1 or more"),
        ("reward.workers", config.reward.workers, lambda x: x >= 1, "1 or more"),
        ("reward.timeout_s", config.reward.timeout_s, lambda x: x > 0, "above 0"),
        ("optim.lr", config.optim.lr, lambda x: x > 0, "above 0"),
        ("optim.warmup_steps", config.optim.warmup_steps, lambda x: x >= 0, "0 or more"),
        ("optim.clip_grad", config.optim.clip_grad, lambda x: x >= 0, "0 (off) or more"),
        ("learner.n_minibatches", config.learner.n_minibatches, lambda x: x >= 1, "1 or more"),
        ("learner.tokens_per_microbatch", config.learner.tokens_per_microbatch, lambda x: x >= 1, "1 or more"),
        ("eval.every", config.eval.every, lambda x: x >= 0, "0 (never) or more"),
        ("eval.max_response_tokens", eval_tokens, lambda x: x >= 1, "1 or more, or null"),
        ("eval.max_prompts", config.eval.max_prompts, lambda x: x >= 1, "1 or more"),
    ]
    for axis in ("tensor", "pipeline", "context", "expert", "data"):
        key = f"{axis}_parallel"
        bounds.append((f"learner.{key}", getattr(config.learner, key), lambda x: x >= 1, "1 or more"))
    for key, value, holds, expected in bounds:
        if not holds(value):
            yield f"{key}: {value:g}, expected {expected}"
    chunks, stages = config.learner.virtual_pipeline, config.learner.pipeline_parallel
    if chunks is not None and not (stages > 1 and chunks > 1):
        yield (
            f"learner.virtual_pipeline: {chunks} with learner.pipeline_parallel={stages}; interleaving needs at least "
            "2 of each, null turns it off"
        )
    if config.learner.n_minibatches > config.rollout.prompts_per_step:
        yield (
            f"learner.n_minibatches: {config.learner.n_minibatches} updates of "
            f"rollout.prompts_per_step={config.rollout.prompts_per_step} groups leave empty ones; lower it"
        )


def _model(config: Config, machine: Machine) -> Iterator[str]:
    hf = read_hf_config(config.model.path)
    unfit = config_problems(config, hf)
    yield from unfit or engine_problems(config, machine, ModelShape.from_hf(hf))
    if "quantization_config" in hf:
        yield (
            f"model.path: {config.model.path} is already quantized; name the BF16 model, and let quantization.format "
            "say what the sampler runs"
        )
    context = hf.get("max_position_embeddings")
    wanted = config.rollout.max_prompt_tokens + config.rollout.max_response_tokens
    if context is not None and wanted > context:
        yield (
            f"rollout.max_prompt_tokens + rollout.max_response_tokens: {wanted}, but the model's context is "
            f"{context} tokens; lower one of the two"
        )
    longest = config.rollout.max_prompt_tokens + (config.eval.max_response_tokens or 0)
    if context is not None and longest > context:
        yield f"eval.max_response_tokens: with the prompt {longest} tokens, above the context of {context}; lower it"
    if config.model.init == ModelInit.pretrained and not list(Path(config.model.path).glob("*.safetensors")):
        yield (
            f"model.path: {config.model.path} holds no .safetensors weights; run the recipe that makes them "
            "(for the toy: recipes/toy_sft.yaml), or set model.init=random"
        )


def _formats(config: Config, machine: Machine) -> Iterator[str]:
    key = "sampler.fleet.formats" if config.sampler.fleet.formats else "quantization.format"
    for format in dict.fromkeys(fleet_config.local_formats(config)):
        problem = format_problem(format, machine.kind, machine.name, machine.capability)
        if problem:
            yield f"{key}: {format}: {problem}"
    smoothing = config.quantization.smoothing or 0.0
    if not 0 <= smoothing < 1:
        yield f"quantization.smoothing: {smoothing:g}, expected 0 < alpha < 1 such as 0.5, or null (off)"
    elif smoothing and config.quantization.format != Format.int8:
        yield (
            f"quantization.smoothing: {smoothing:g} with quantization.format={config.quantization.format}; only int8 "
            "gains from it: set quantization.format=int8, or quantization.smoothing=null"
        )
    if config.learner.fp8 != Fp8.none and machine.kind == Device.cpu:
        yield f"learner.fp8: {config.learner.fp8} needs Transformer Engine on a GPU; use none"
    if config.learner.context_parallel > 1:
        yield f"learner.context_parallel: {config.learner.context_parallel} is not built yet; use 1"
    if config.sync.delta and config.sync.transport != Transport.file:
        yield f"sync.delta: true with sync.transport={config.sync.transport}; patches travel as files only: use file"
    if config.sync.dir is not None and not Path(config.sync.dir).is_dir():
        yield f"sync.dir: no folder {config.sync.dir!r}; make it, or leave null for shared memory"


def _sampler(config: Config, machine: Machine) -> Iterator[str]:
    sampler, rollout = config.sampler, config.rollout
    if sampler.devices is not None:
        devices = sampler.devices.split(",")
        if not all(map(str.isdecimal, devices)) or len(set(devices)) != len(devices):
            yield f"sampler.devices: {sampler.devices!r}, expected numbers of GPUs such as '4,5', each once"
        elif len(devices) != sampler.tensor_parallel:
            yield (
                f"sampler.devices: {sampler.devices!r} are {len(devices)} GPUs for "
                f"sampler.tensor_parallel={sampler.tensor_parallel}; name as many"
            )
    for name in sorted(OWNED_ARGUMENTS & set(sampler.vllm)):
        yield f"sampler.vllm.{name}: is set by the sampler itself; remove it"
    filtered = {"top_p": rollout.top_p != 1.0, "top_k": rollout.top_k != -1}
    for key in [key for key, is_set in filtered.items() if is_set]:
        yield (
            f"rollout.{key}: {getattr(rollout, key)}, but the learner does not filter its own probabilities yet, so "
            f"every ratio would be off; use {getattr(RolloutSection(), key)}"
        )


def _fleet(config: Config, machine: Machine) -> Iterator[str]:
    yield from fleet_config.problems(config, machine.kind)


def _data(config: Config, machine: Machine) -> Iterator[str]:
    for key, needed in (("train", True), ("eval", config.eval.every > 0)):
        value = getattr(config.data, key)
        if needed and not value:
            yield f"data.{key}: not set; name a .jsonl or .parquet file" + (
                ", or set eval.every=0" if key == "eval" else ""
            )
        elif value and not Path(value).is_file():
            yield f"data.{key}: no file {value!r}; `megatron-rl toy` makes the toy's data"
    try:
        resolve(config.reward.name)
    except LookupError as error:
        yield f"reward.name: {error.args[0]}"


def _algorithm(config: Config, machine: Machine) -> Iterator[str]:
    supervised = config.rollout.source == RolloutSource.dataset
    if supervised and config.loss.name not in SUPERVISED:
        goes = ", ".join(SUPERVISED)
        yield f"loss.name: {config.loss.name} needs sampled answers; rollout.source=dataset goes with {goes}"
    if supervised and config.advantage.estimator != Estimator.none:
        yield f"advantage.estimator: {config.advantage.estimator} on the data set's own answers is 0; use none"
    if supervised and config.rollout.samples_per_prompt != 1:
        yield "rollout.samples_per_prompt: the data set has one answer per prompt; use 1 with rollout.source=dataset"
    if config.sampler.tensor_parallel > 1 and Format.fp8_block in fleet_config.replica_formats(config):
        yield "sampler.tensor_parallel: 128x128 blocks over several sampler ranks are not built yet; use 1"
    if config.eval.every % config.sync.every:
        yield (
            f"eval.every: {config.eval.every} is not a multiple of sync.every={config.sync.every}: "
            "the sampler would be evaluated with an older policy"
        )
    if config.run.stop_metric is not None and not config.run.stop_metric.startswith("eval/"):
        yield f"run.stop_metric: {config.run.stop_metric!r}, expected one of eval/ (such as eval/accuracy)"


def _logging(config: Config, machine: Machine) -> Iterator[str]:
    try:
        resolve_mode(config.log.wandb)
    except (ValueError, RuntimeError) as error:
        yield str(error)


def _passed_through(config: Config, machine: Machine) -> Iterator[str]:
    known = _megatron_fields()
    for key in config.learner.megatron:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean learner.megatron.{near[0]}?" if near else ""
            yield f"learner.megatron.{key}: megatron-core's TransformerConfig has no such field{hint}"


def _megatron_fields() -> set[str]:
    """Read from megatron-core's source: importing it takes longer than a mistake should take to be found."""
    spec = importlib.util.find_spec("megatron.core")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    core = Path(spec.submodule_search_locations[0])
    fields: set[str] = set()
    for file in (core / "model_parallel_config.py", core / "transformer" / "transformer_config.py"):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef) and node.name in ("ModelParallelConfig", "TransformerConfig"):
                fields |= {field.target.id for field in node.body if _is_field(field)}  # type: ignore[attr-defined]
    return fields


def _is_field(node: ast.stmt) -> bool:
    return isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)


_RULES = (_numbers, _model, _formats, _sampler, _fleet, _data, _algorithm, _logging, _passed_through)
