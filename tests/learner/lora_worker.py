"""A learner with given adapters: logprobs, gradients of the adapters, and merged weights."""

import hashlib
from pathlib import Path
from typing import Any

import torch
from learner_cases import make_batch, make_targets, update
from safetensors.torch import load_file, save_file

from megatron_rl.checkpoint.torch_dist.reader import Reader
from megatron_rl.checkpoint.torch_dist.writer import write_blocks, write_index
from megatron_rl.config.schema import Format
from megatron_rl.distributed import exchange
from megatron_rl.learner import state, weights
from megatron_rl.learner.learner import Learner
from megatron_rl.models.hf_folder import write_folder
from megatron_rl.models.layout import Layout, Place
from megatron_rl.models.mapping import adapters, params
from megatron_rl.models.shards import cut
from megatron_rl.weight_sync.source import ShardSource

BETA = 0.9  # Adam's first, megatron-core's default here


def adapted(learner: Learner, job: dict[str, Any]) -> dict[str, Any]:
    """`adapters`: file with PEFT's names; `out`: folder for results too large for a reply."""
    batch = make_batch()
    out = Path(job["out"])
    given = load_file(job["adapters"])
    trained = [
        (name, weight) for name, weight in learner.named_parameters() if weight.requires_grad
    ]
    weights.load(
        iter(trained),
        learner.model,
        learner.place,
        lambda name: given[name],
    )
    learner.optimizer.reload_model_params()
    before_N = learner.logprobs(batch)
    sent = {format: _sent(learner, format) for format in (Format.none, Format.int8, Format.fp8)}
    merged = _whole(learner, Format.none)
    expected_N = learner.expected_logprobs(batch)
    learner.keep_reference()
    base_N = learner.reference_logprobs(batch)
    frozen = [weight for _, weight in learner.named_parameters() if not weight.requires_grad]
    copies = [weight.clone() for weight in frozen]
    step = update(learner, batch, make_targets(batch, before_N))
    assert all(map(torch.equal, frozen, copies))
    assert all(getattr(weight, "main_grad", None) is None for weight in frozen)
    write_state(learner, out)
    if learner.is_driver:
        write_folder(out / "merged", merged, learner.model.hf_config)
        save_file(_gradients(learner, Reader(out)), out / "gradients.safetensors")
    after_N = learner.logprobs(batch)
    learner.broadcast()
    weights.load(
        iter(trained),
        learner.model,
        learner.place,
        lambda name: given[name],
    )
    learner.load_hf(out)  # its adapters alone
    return {
        "logprobs": before_N,
        "base": base_N,
        "sent": sent,
        "step": step,
        "expected": expected_N,
        "after": after_N,
        "again": learner.logprobs(batch),
    }


def write_state(learner: Learner, folder: Path) -> None:
    """A checkpoint's tensors, without what each rank keeps of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    blocks = exchange(
        write_blocks(folder / f"rank_{learner.rank}.distcp", state.LearnerState(learner).blocks())
    )
    if learner.is_driver:
        write_index(folder, [block for part in blocks for block in part])


def _whole(learner: Learner, format: Format) -> dict[str, torch.Tensor]:
    """All tensors of a sync, on rank 0: pipeline stages and expert ranks write their own."""
    source = ShardSource(learner.model, learner.groups, format, ("lm_head",))
    mine = {
        name: tensor.clone() for name, tensor in source.tensors(dict(learner.named_parameters()))
    }
    assert source.failure is None, source.failure
    found = {}
    for part in exchange({name: [str(t.dtype), t.float().tolist()] for name, t in mine.items()}):
        for name, (dtype, values) in part.items():
            found[name] = torch.tensor(values).to(getattr(torch, dtype.removeprefix("torch.")))
    return found


def _sent(learner: Learner, format: Format) -> dict[str, str]:
    """Digests of all that a sync sends."""
    return {
        name: hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, tensor in sorted(_whole(learner, format).items())
    }


def _gradients(learner: Learner, reader: Reader) -> dict[str, torch.Tensor]:
    """Gradients of the first update by PEFT's names, read from Adam's first moments."""
    shape = learner.shape
    found = {}
    for param in params(shape):
        for one in adapters(param, shape):
            entry = reader.find(one, shape)
            size = one.local_shape(Layout())
            moments = reader.read(entry, (0,) * len(size), size, "optimizer.state.exp_avg.")
            for piece, part in cut(
                one,
                moments / (1 - BETA),
                one.slices(shape, Layout(), Place()),
            ):
                found[piece.name] = part.clone().contiguous()
    return found
