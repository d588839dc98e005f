"""Seconds of a step's phases on hosts without a GPU, part by part: how often something is done, times what it costs.

Engines and ranks share the host's cores: what is computed takes as long on one of them as on several.
"""

from __future__ import annotations

from collections.abc import Mapping

from megatron_rl.config.fleet import max_sequences
from megatron_rl.config.prox_pass import makes_prox_pass
from megatron_rl.learner.modules.costs import operations
from megatron_rl.models.mapping import parameters
from megatron_rl.quantization.formats import QUANTIZED
from megatron_rl.workshop.planner.case import Case
from megatron_rl.workshop.planner.time import keeps_prefixes

Part = tuple[str, str]  # phase, what takes its time
Parts = Mapping[Part, float]

GIGA = 1e9
BLOCK = 128  # tokens of a prefix that vLLM keeps on hosts; what fills no block is prefilled for each answer
# seconds of one; `--fit` puts a host's own in their place. One thread of an AMD EPYC (Zen 5: AVX-512, BF16, VNNI), from
# the runs of tools/bench/precision.py that constants are taken from
COSTS = {
    "step": 2e-3,  # of an engine: one token of every sequence under way
    "layer": 1.1e-3,  # of such a step, and of a micro-batch of the learner
    "token": 2e-5,  # sampled
    "attention": 1 / (5 * GIGA),  # an operation
    "head": 1 / (150 * GIGA),
    "none": 1 / (150 * GIGA),  # an operation of the layers' matrices, by their format
    "int8": 1 / (300 * GIGA),
    "fp8": 1 / (150 * GIGA),
    "int4": 1 / (300 * GIGA),
    "rounding": 1 / GIGA,  # an activation, where a matrix is quantized
    "rounding fp8": 25 / GIGA,  # by a cast to FP8 and back
    "calls": 2.5e-4,  # more of a layer's step where its matrices are quantized
    "update": 1e-2,
    "weight": 3e-9,  # of the optimizer
    "sync": 2.5e-2,
    "byte": 1e-9,  # written, read, checked
    "quantized": 2e-9,  # a weight
}


def parts(case: Case) -> dict[Part, float]:
    """Seconds of each part of each phase; its name, or the first word of it, is a cost's."""
    counted = {**_rollout(case), **_learner(case), **_sync(case)}
    return {part: count * (COSTS.get(part[1]) or COSTS[part[1].partition(" ")[0]]) for part, count in counted.items()}


def _rollout(case: Case) -> dict[Part, float]:
    work, shape, format = case.work, case.model.shape, case.config.quantization.format
    sequences, sampled = work.sequences * case.assumed.batches, work.sampled
    each = operations(case.model, 2 * work.halfway)
    longest = case.config.rollout.max_response_tokens * case.assumed.longest * work.turns
    engines = max(case.roles.engines, 1)
    together = min(max_sequences(case.config.sampler) * engines, work.open * case.assumed.batches)
    steps = sequences * sampled / together + max(longest - sampled, 0)
    kept, block = keeps_prefixes(case.config.sampler), int(case.config.sampler.vllm.get("block_size", BLOCK))
    shared = kept * (work.prompt // block * block)  # by the answers to a prompt
    first = work.prompt - shared * (1 - 1 / case.config.rollout.samples_per_prompt)
    later = sampled + work.prefilled(kept)
    tokens = sequences * (first + later)
    found = {
        "step": steps,
        "layer": steps * shape.layers,
        "token": sequences * sampled,
        "attention": sequences * (first * operations(case.model, work.prompt).attention + later * each.attention),
        "head": sequences * sampled * each.head,
        f"{format} products": tokens * (each.dense + each.experts),
    }
    if format in QUANTIZED:
        wide = shape.hidden + shape.size("q") + shape.hidden + (shape.expert_ffn if shape.experts else shape.ffn)
        found |= {f"rounding {format}": tokens * shape.layers * wide, f"calls {format}": steps * shape.layers}
    return {("rollout", name): count for name, count in found.items()}


def _learner(case: Case) -> dict[Part, float]:
    config, work, packs = case.config, case.work, case.packs
    each = operations(case.model, work.length)
    forward = work.tokens * (each.dense + each.experts) + work.sequences * work.response * each.head
    attention, layers = work.tokens * each.attention, packs * case.model.shape.layers
    scores = makes_prox_pass(config.correction, config.loss, config.learner, config.rollout) + bool(config.loss.kl_coef)
    again = case.training.granularity == "full"
    return {
        ("update", "update"): work.updates,
        ("update", "weight"): work.updates * parameters(case.model.shape),
        ("update", "layer"): 3 * work.updates * layers,
        ("update", "none products"): (3 + again) * forward,
        ("update", "attention"): (3 + again) * attention,
        ("prox", "layer"): scores * work.updates * layers,
        ("prox", "none products"): scores * forward,
        ("prox", "attention"): scores * attention,
    }


def _sync(case: Case) -> dict[Part, float]:
    format, every = case.config.quantization.format, case.config.sync.every
    found = {"sync": 1.0, f"byte {format}": float(case.weights.nbytes)}
    if format in QUANTIZED:
        found[f"quantized {format}"] = float(parameters(case.model.shape))
    return {("sync", name): count / every for name, count in found.items()}
