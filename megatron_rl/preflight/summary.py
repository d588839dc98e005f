"""What a recipe would do on this machine, in a few lines: the output of --dry-run."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from megatron_rl.config.fleet import is_fleet, replica_formats
from megatron_rl.config.schema import Config
from megatron_rl.launch import world_size
from megatron_rl.models.model import Model
from megatron_rl.preflight.machine import Machine
from megatron_rl.preflight.sync_plan import plan_sync


def describe(config: Config, machine: Machine) -> str:
    layout, rollout = config.learner, config.rollout
    plan = plan_sync(Model.read(config.model.path, layout), config.quantization.format, config.quantization.ignore)
    axes = [
        f"{name}{size}"
        for name, size in (
            ("TP", layout.tensor_parallel),
            ("PP", layout.pipeline_parallel),
            ("CP", layout.context_parallel),
            ("EP", layout.expert_parallel),
            ("DP", layout.data_parallel),
        )
        if size > 1
    ]
    loss = f"{config.loss.name}, {config.advantage.estimator} advantages, correction: {_correction(config)}"
    rows = [
        ("run", str(Path(config.run.root) / str(config.run.name))),
        ("machine", machine.name),
        ("model", f"{config.model.path}, {plan.plain_bytes / 2e6:.2f}M parameters, {config.model.init}"),
        ("learner", f"{world_size(config)} ranks ({' '.join(axes) or 'one rank'}), {layout.precision}"),
        ("sampler", _sampler(config)),
        ("sync", f"{config.sync.transport}, {plan.nbytes / 1e6:.2f} MB in {len(plan.transfers)} tensors each time"),
        ("step", f"{rollout.prompts_per_step} prompts x {rollout.samples_per_prompt} answers, at most "
                 f"{rollout.max_response_tokens} tokens each; {layout.n_minibatches} update(s)"),
        ("loss", loss),
        ("steps", f"{config.run.steps}" + _stop(config)),
    ]  # fmt: skip
    return "\n".join(f"{name:<8} {text}" for name, text in rows) + "\nnothing was written (dry run)"


def _sampler(config: Config) -> str:
    formats = Counter(replica_formats(config))
    parallel = f"TP{config.sampler.tensor_parallel}"
    if not is_fleet(config):
        return f"vLLM, format {config.quantization.format}, {parallel}"
    return (
        f"{sum(formats.values())} vLLM servers ({', '.join(f'{n} {f}' for f, n in formats.items())}), {parallel} each"
    )


def _correction(config: Config) -> str:
    weight = config.correction.weight
    rules = f", {len(config.correction.reject)} reject rule(s)" if config.correction.reject else ""
    return f"{weight.level} weight" + (f" capped at {weight.high:g}" if weight.high else "") + rules


def _stop(config: Config) -> str:
    return f", or {config.run.stop_metric} >= {config.run.stop_at:g}" if config.run.stop_metric else ""
