"""Rank process: builds a Learner for each job in a list and runs it; rank 0 writes the results."""

import gc
import hashlib
import json
import math
import os
import sys
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from device_worker import mixes, whole
from head_worker import at_a_time, head_memory, heads
from held_memory import Saved, buffers, static
from learner_cases import (
    EMPTINESS,
    Fields,
    make_batch,
    make_even_batch,
    make_targets,
    update,
    with_kept,
)
from lora_worker import adapted, write_state
from mocked_device import on_device
from replicas_worker import replicas
from routing_worker import faulty, mixture, routed
from safetensors.torch import load_file, save_file
from saver_worker import saves
from shares_worker import shared
from top_worker import top

from megatron_rl.batch import UpdateInputs
from megatron_rl.checkpoint.torch_dist.reader import Reader
from megatron_rl.config import from_mapping, to_yaml
from megatron_rl.config.schema import Config, ModelSection, Precision
from megatron_rl.distributed import exchange
from megatron_rl.learner.learner import Learner
from megatron_rl.learner.modules.observers import Amax
from megatron_rl.learner.nonfinite import NonFiniteError
from megatron_rl.learner.parallel import RENDEZVOUS, leave
from megatron_rl.learner.state import LearnerState
from megatron_rl.models.layout import Layout
from megatron_rl.models.model import Model
from megatron_rl.models.shape import Lora
from megatron_rl.quantization import cpu_matmul
from megatron_rl.step import CorrectedBatch
from megatron_rl.types import NO_EXPERT

STEPS_ASIDE = 3
# keys of a job, and of the configuration
KEYS = {
    "precision": "learner.precision",
    "on_nonfinite": "learner.on_nonfinite",
    "forward": "learner.forward",
    "engine_tp": "sampler.tensor_parallel",
    "format": "quantization.format",
    "smoothing": "quantization.smoothing",
    "kv_cache": "quantization.kv_cache",
    "ignore": "quantization.ignore",
    "loss": "loss.name",
    "entropy_coef": "loss.entropy_coef",
    "kl_coef": "loss.kl_coef",
    "kl_on": "loss.kl_on",
    "optim": "optim.megatron",
    "offload": "learner.offload",
    "lr": "optim.lr",
    "anchor": "correction.anchor",
    "reject": "correction.reject",
}


def config_of(job: Fields) -> Config:
    sections = {
        "learner": {"precision": "fp32", **job.get("layout", {})},
        "optim": {"lr": 1e-3, "warmup_steps": 2},
        "rollout": {"temperature": 0.8, **({"top_k": 5, "top_p": 0.7} if job.get("kept") else {})},
        "quantization": {"format": "int8"},
    }
    if "recompute" in job:  # by rank
        sections["learner"]["recompute"] = job["recompute"][int(os.environ["RANK"])]
    for key in KEYS.keys() & job.keys():
        section, _, name = KEYS[key].partition(".")
        sections.setdefault(section, {})[name] = job[key]
    return from_mapping(sections)


def build(job: Fields) -> Learner:
    os.environ[RENDEZVOUS] = job["meeting"]
    config = config_of(job)
    dumps = Path(job["dump"]) if "dump" in job else None
    if dumps and os.environ["RANK"] == "0":  # what a run leaves beside its dumps
        dumps.parent.mkdir(parents=True, exist_ok=True)
        (dumps.parent / "config.json").write_text(json.dumps(job["hf"]))
        whole = replace(config, model=ModelSection(path=str(dumps.parent)))
        (dumps.parent / "config.yaml").write_text(to_yaml(whole))
    learner = config.learner
    head = Precision(job.get("head", "bf16"))
    model = Model.of(
        job["hf"],
        Layout.from_config(learner),
        head,
        Lora.of(learner.lora),
    )
    made = Learner(model, config, dumps)
    if not job.get("reads"):  # a run that goes on loads nothing else
        begin(made, job)
    return made


def begin(learner: Learner, job: Fields) -> None:
    if "folder" in job:
        learner.load_hf(job["folder"])
    else:
        learner.init_random(7)


def train(learner: Learner, job: Fields) -> Fields:
    batch = with_kept(make_batch()) if job.get("kept") else make_batch()
    before_N = learner.logprobs(batch)
    targets = make_targets(batch, before_N)
    steps = [update(learner, batch, targets) for _ in range(job.get("steps", 0))]
    after_N = learner.logprobs(batch) if steps else before_N
    return {"logprobs": before_N, "after": after_N, "steps": steps}


def aside(learner: Learner, job: Fields) -> Fields:
    """Updates with syncs and checkpoints between them, while the optimizer is offloaded."""
    batch = make_batch()
    found = []
    kept = []
    for _ in range(STEPS_ASIDE):
        before_N = learner.logprobs(batch)
        found.append(update(learner, batch, make_targets(batch, before_N)))
        kept.append(_digest(learner))
        learner.release_memory()
        learner.release_memory()  # a step without a sync
        if learner.offload is not None:
            grads = [buffer.grad_data for buffer in buffers(learner)]
            assert learner.offload.away
            assert not any(grad.untyped_storage().size() for grad in grads)
        assert _digest(learner) == kept[-1], "a checkpoint's bytes"
    return {"steps": found, "kept": exchange(kept), "after": learner.logprobs(batch)}


def _digest(learner: Learner) -> str:
    """Digest of everything that this rank writes into a checkpoint."""
    found = hashlib.sha256()
    for block in LearnerState(learner).blocks():
        values = block.tensor.contiguous().cpu().view(torch.uint8).numpy().tobytes()
        found.update(f"{block.key} {block.offset}".encode() + values)
    return found.hexdigest()


def one_update(learner: Learner, job: Fields) -> Fields:
    """Update on a batch that trains all rows: `scored` before it, or by its own forward pass."""
    batch = make_batch().rows(torch.tensor([row for row in range(14) if row not in (3, 5)]))
    share = learner.part(batch)
    anchor_N = learner.logprobs(share) if job["scored"] else None
    targets = CorrectedBatch.corrected(config_of(job), share, 0, anchor_N).targets(None)
    with mock.patch.object(Amax, "add", autospec=True, side_effect=Amax.add) as add:
        metrics = learner.update(share, targets)
    looks = Counter(type(call.args[0]).__name__ for call in add.call_args_list)
    each = len(learner.own_layers) * len(learner._packs(share, torch.arange(len(batch))))
    own_N = learner.take_own_logprobs()
    assert (own_N is None) == job["scored"] and learner.take_own_logprobs() is None
    return {
        "metrics": metrics,
        "prox": learner.data_plane.join(anchor_N if own_N is None else own_N, share),
        "amax": _over_all_ranks(learner, learner.take_activation_amax()),
        # of a layer in a micro-batch
        "looks": {name: count / each for name, count in looks.items()},
        "after": learner.logprobs(batch),
    }


def expects(learner: Learner, job: Fields) -> Fields:
    """Logprobs of the learner itself, and those it expects of the sampler."""
    batch = make_batch()
    own_N = learner.logprobs(batch)
    expected_N = learner.expected_logprobs(batch)
    assert expected_N is not None
    assert torch.equal(own_N, learner.logprobs(batch)), "its own arithmetic is as before"
    return {"own": own_N, "expected": expected_N}


def noise(learner: Learner, job: Fields) -> Fields:
    """Effect of a second rounding on the logprobs, twice; checks that it leaves no trace."""
    batch = make_batch()
    before_N = learner.logprobs(batch)
    learner.take_activation_amax(), learner.take_cache_amax()
    moved_N, again_N = (learner.logprobs_rounded_again(batch) for _ in range(2))
    expected_N = learner.expected_logprobs(batch)

    def distance(logprobs_N: torch.Tensor) -> torch.Tensor:
        return (logprobs_N - before_N)[batch.mask_N].abs().mean()

    return {
        "noise": distance(moved_N),
        "expected": None if expected_N is None else distance(expected_N),
        "repeats": torch.equal(moved_N, again_N),
        "seen": learner.take_activation_amax().any() or learner.take_cache_amax().any(),
        "same": torch.equal(before_N, learner.logprobs(batch)),
    }


def wide(learner: Learner, job: Fields) -> Fields:
    """Two updates; True if the output layer returns FP32 products, False if it rounds."""
    exact = []

    def look(layer: torch.nn.Module, args: tuple[Any, ...], kwargs: Fields, output: Any) -> None:
        weight = kwargs["weight"] if kwargs["weight"] is not None else layer.weight
        product = args[0].float().matmul(weight.float().t())
        order = 1e-4 if product.is_cuda else 0  # of the sums, which rounding to BF16 is well above
        exact.append(
            output[0].dtype == torch.float32
            and torch.allclose(output[0], product, rtol=order, atol=order)
        )

    for module in learner.modules:
        if module.post_process:
            module.output_layer.register_forward_hook(look, with_kwargs=True)
    return train(learner, job) | {"exact": [all(part) for part in exchange(exact)]}


def flips(learner: Learner, job: Fields) -> list[Any]:
    """Flips against another engine's experts, and with one expert of two tokens exchanged."""
    batch = make_batch()
    chosen_PLK = load_file(job["chosen"])["chosen"]
    exchanged_PLK = chosen_PLK.clone()
    ends = batch.lengths_B.cumsum(0).tolist()
    for place in ((ends[0] + 3, 0), (ends[1], 3)):  # of the rows 1 and 2: position, layer
        chosen = chosen_PLK[place].tolist()
        exchanged_PLK[(*place, 1)] = min({0, 1, 2} - {*chosen})
    nothing_PLK = torch.full_like(chosen_PLK, NO_EXPERT)
    return [
        learner.router_flips(batch, given) for given in (chosen_PLK, exchanged_PLK, nothing_PLK)
    ]


def rejected(learner: Learner, job: Fields) -> dict[str, float]:
    """A minibatch of rejected, counted rows; its reference is 0.5 below the policy."""
    batch = make_batch()
    before_N = learner.logprobs(batch)
    targets = make_targets(batch, before_N)
    nothing_N = torch.zeros_like(batch.mask_N)
    targets = replace(targets, ref_logprobs_N=before_N - 0.5, mask_N=nothing_N)
    return update(learner, batch, targets)


def emptiness(learner: Learner, job: Fields) -> Fields:
    """Scores and one update for every case of little or nothing."""
    found = {}
    for name, make in EMPTINESS.items():
        learner.init_random(7)
        learner.take_activation_amax(), learner.take_cache_amax()
        before = [parameter.detach().clone() for _, parameter in learner.named_parameters()]
        batch = make()
        logprobs_N = learner.logprobs(batch)
        steps = learner.steps
        seen = {"norms": learner.take_activation_amax(), "cache": learner.take_cache_amax()}
        metrics = update(learner, batch, make_targets(batch, torch.zeros_like(logprobs_N)))
        moved = [
            not torch.equal(old, new)
            for old, (_, new) in zip(before, learner.named_parameters(), strict=True)
        ]
        found[name] = {
            "logprobs": logprobs_N,
            "seen": {what: _over_all_ranks(learner, amax) for what, amax in seen.items()},
            "update": metrics,
            "steps": learner.steps - steps,
            "moved": any(exchange(any(moved))),
        }
    return found


def _over_all_ranks(learner: Learner, seen: torch.Tensor) -> torch.Tensor:
    if learner.world_size > 1:
        dist.all_reduce(seen, dist.ReduceOp.MAX)
    return seen


def _huge_weights(learner: Learner, good: UpdateInputs) -> UpdateInputs:
    for name, parameter in learner.named_parameters():
        if name.endswith("layers.2.mlp.linear_fc1.weight"):
            parameter.data.fill_(3e38)
    return good


SPOILT = {
    "an advantage": lambda learner, good: replace(
        good,
        advantages_B=good.advantages_B.index_fill(
            0,
            torch.tensor([1]),
            math.inf,
        ),
    ),
    "all advantages": lambda learner, good: replace(good, advantages_B=good.advantages_B * 1e30),
    "a layer": _huge_weights,
}


def nonfinite(learner: Learner, job: Fields) -> Fields:
    """A minibatch that is not finite, once or several times, then a good one."""
    batch = make_batch()
    before_N = learner.logprobs(batch)
    good = make_targets(batch, before_N)
    bad = SPOILT[job.get("spoilt", "an advantage")](learner, good)
    try:
        for _ in range(job.get("times", 1)):
            metrics = update(learner, batch, bad)
            error = ""
    except NonFiniteError as caught:
        metrics = {}
        error = str(caught)
    unchanged = torch.equal(before_N, learner.logprobs(batch))
    return {
        "metrics": metrics,
        "error": error,
        "unchanged": unchanged,
        "next": update(learner, batch, good),
    }


def broadcast(learner: Learner, job: Fields) -> Fields:
    kept = with_kept(make_batch())
    plain = {"step": 3, "note": [1.5, None, True, "x"]}
    sent = {"kept": kept, "tensor": torch.arange(5), **plain}
    got = learner.broadcast(sent if learner.is_driver else None)
    same = got["kept"].turns_N is None
    same &= torch.equal(
        got["kept"].rows(torch.arange(3)).kept_ids_K, kept.rows(torch.arange(3)).kept_ids_K
    )
    same &= {name: got[name] for name in plain} == plain and got["tensor"].tolist() == [*range(5)]
    return learner.ranks.add_up({"same": float(same), f"rank_{learner.rank}": 1.0})


def activations(learner: Learner, job: Fields) -> Fields:
    """Norm outputs recorded over all ranks; a second pass has nothing left from the first."""
    batch = make_batch()
    learner.keep_reference()
    learner.reference_logprobs(batch)  # another policy's activations
    unseen_L2 = learner.take_cache_amax()
    update(learner, batch, make_targets(batch, torch.zeros(batch.mask_N.shape)))
    unseen_LNH = learner.take_activation_amax()
    trained_L2 = learner.take_cache_amax()
    begin(learner, job)
    learner.logprobs(batch)
    cached_L2 = learner.take_cache_amax()
    seen_LNH = learner.take_activation_amax()
    return {
        "amax": _over_all_ranks(learner, seen_LNH),
        "unseen": unseen_LNH.any(),
        "left": learner.take_activation_amax().any(),
        "cache": _over_all_ranks(learner, cached_L2),
        "cache_unseen": unseen_L2.any(),
        "cache_trained": _over_all_ranks(learner, trained_L2),
    }


def memory(learner: Learner, job: Fields) -> list[dict[str, int]]:
    """Each rank's bytes in an update on rows of one length."""
    batch = make_even_batch(**job["batch"], vocab=learner.shape.vocab)
    targets = make_targets(batch, batch.sampler_logprobs_N)
    saved = Saved(learner)
    with saved.watching():
        update(learner, batch, targets)
    return exchange({**static(learner), **saved.peak})


def dead_rank(learner: Learner, job: Fields) -> str:
    """The other rank dies while this one waits for it."""
    if not learner.is_driver:
        os._exit(1)
    try:
        learner.ranks.sum(torch.zeros(4))
    except RuntimeError as error:
        return str(error)
    return ""


def checkpoint(learner: Learner, job: Fields) -> Fields:
    """Two updates, then a write of the state or a read of another learner's, then two more."""
    batch = make_batch()
    folder = Path(job["checkpoint"])
    targets = make_targets(batch, torch.zeros(batch.mask_N.shape))
    held = LearnerState(learner)
    tensors_file = folder / f"own_{learner.rank}.safetensors"
    text_file = tensors_file.with_suffix(".json")
    if job["reads"]:
        held.restore(Reader(folder), 2)
        if learner.world_size == job["wrote"]:
            held.restore_own(load_file(tensors_file), json.loads(text_file.read_text()))
    else:
        for _ in range(2):
            update(learner, batch, targets)
        write_state(learner, folder)
        tensors, text = held.own()
        save_file(tensors, tensors_file)
        text_file.write_text(json.dumps(text))
        learner.broadcast()
    return {
        "steps": [update(learner, batch, targets) for _ in range(2)],
        "after": learner.logprobs(batch),
    }


def straight_through(learner: Learner, job: Fields) -> dict[str, bool]:
    """Each layer with and without its quantized weight: other outputs, the same gradients."""
    learner.logprobs(make_batch())
    random = torch.Generator().manual_seed(1)
    found = {}
    for module in learner.modules:
        for name, layer in module.named_modules():
            if getattr(layer, "sampled", None) is None:
                continue
            x = torch.randn(
                10,
                1,
                layer.weight.shape[1],
                generator=random,
            ).to(layer.weight.dtype)
            passes = []
            for sampled in (layer.sampled, None):
                layer.sampled = sampled
                mine = x.clone().requires_grad_()
                out, _ = layer(mine)
                grad = torch.linspace(-1, 1, out.numel()).view(out.shape).to(out.dtype)
                passes.append(
                    (
                        out.detach(),
                        *torch.autograd.grad(
                            out,
                            (mine, layer.weight),
                            grad,
                        ),
                    )
                )
            (out, *mine), (plain, *theirs) = passes
            found[name] = all(map(torch.equal, mine, theirs)) and not torch.equal(out, plain)
            rounding = 0.05 if job.get("format") == "fp8" else 0.02
            found[name] &= float((out - plain).norm() / plain.norm()) < rounding
    return found


def refused(job: Fields) -> str:
    """The error that a configuration is refused with. `reversed`: with the ranks in another order
    than megatron's; `cpuinfo`: on another processor.
    """
    place = Layout.place
    flags = cpu_matmul.CPU_FLAGS
    cpu_matmul.CPU_FLAGS = Path(job.get("cpuinfo", flags))
    if job.get("reversed"):
        Layout.place = lambda layout, rank: place(layout, layout.world - 1 - rank)
    try:
        build(job).close()
    except (ValueError, RuntimeError) as error:
        leave()
        return str(error)
    finally:
        Layout.place = place
        cpu_matmul.CPU_FLAGS = flags
    return ""


KINDS = {
    kind.__name__: kind
    for kind in (
        train,
        nonfinite,
        rejected,
        replicas,
        flips,
        expects,
        noise,
        wide,
        one_update,
        emptiness,
        broadcast,
        dead_rank,
        activations,
        aside,
        checkpoint,
        saves,
        memory,
        straight_through,
        whole,
        mixes,
        adapted,
        routed,
        faulty,
        heads,
        head_memory,
        shared,
        mixture,
        top,
    )
}


def main() -> None:
    jobs = json.loads(Path(sys.argv[1]).read_text())
    out = Path(sys.argv[2])
    results = {}
    for job in jobs:
        if job.get("kind") == "refused":
            results[job["name"]] = refused(job)
            continue
        if "poisoned" in job:  # unwritten entries are NaN
            torch.use_deterministic_algorithms(True, warn_only=True)
            torch.utils.deterministic.fill_uninitialized_memory = True
        with on_device() if job.get("on_device") else nullcontext(), at_a_time(job.get("columns")):
            learner = build(job)
            results[job["name"]] = KINDS[job.get("kind", "train")](learner, job)
            if job.get("kind") != "dead_rank":
                learner.close()
        del learner
        # only with it do the fifty threads of its process groups end; sixty learners have thousands
        gc.collect()
    if os.environ["RANK"] == "0":
        out.write_text(json.dumps(results, default=torch.Tensor.tolist))


if __name__ == "__main__":
    main()
