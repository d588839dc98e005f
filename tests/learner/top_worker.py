"""A job of `learner_worker.py`: logprobs of top tokens, and the gradient of a loss of them.

N response tokens, H hidden width, V tokens of the vocabulary, M top tokens of each token at most, E
at all tokens.
"""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from learner_cases import make_batch, make_targets, with_kept, with_top
from lora_worker import BETA, write_state
from safetensors.torch import save_file
from torch import Tensor

from megatron_rl.batch import UpdateInputs
from megatron_rl.checkpoint.torch_dist.reader import Reader
from megatron_rl.learner import learner as learner_module
from megatron_rl.learner.learner import Learner
from megatron_rl.learner.modules import model
from megatron_rl.learner.modules.head import LogprobOutput, LogprobRequest
from megatron_rl.learner.modules.packing import Pack
from megatron_rl.models.layout import Layout
from megatron_rl.models.mapping import params


def top(learner: Learner, job: dict[str, Any]) -> dict[str, Any]:
    """Logprobs of labels and top tokens before an update, its gradients in `out`. `plain`: by the
    definition, from the logits of the whole vocabulary on one rank.
    """
    batch = with_top(with_kept(make_batch()) if job.get("kept") else make_batch())
    share = learner.split(batch if learner.is_driver else None)
    plain = mock.patch.object(model, "scores", _defined) if job.get("plain") else nullcontext()
    loss = mock.patch.object(learner_module, "policy_loss", _loss)
    with plain, loss:
        logprobs_N, top_E = learner.logprobs_of_top(share)
        if not job.get("plain"):
            assert torch.equal(logprobs_N, learner.logprobs(share))
        own = make_targets(batch, None).rows(share.own)
        targets = replace(
            own,
            anchor_logprobs_N=logprobs_N,
            top_counts_N=share.batch.top_counts_N,
            top_logprobs_E=share.batch.top_logprobs_E,
            top_anchor_E=top_E,
        )
        step = learner.update(share, targets)
    out = Path(job["out"])
    write_state(learner, out)
    if learner.is_driver:
        save_file(_gradients(learner, Reader(out)), out / "gradients.safetensors")
    every = learner.data_plane.collect(
        share, {"top_logprobs_E": top_E, "sampler_logprobs_N": logprobs_N}
    )
    learner.broadcast()
    return {
        "step": step,
        "top": every.get("top_logprobs_E"),
        "logprobs": every.get("sampler_logprobs_N"),
    }


def _loss(
    logprobs_N: Tensor, targets: UpdateInputs, *rest: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    """Each top token has a coefficient of its own, by columns that came with its row."""
    top_E = rest[-1]
    assert top_E.shape == targets.top_logprobs_E.shape
    torch.testing.assert_close(top_E.detach(), targets.top_anchor_E, rtol=0, atol=1e-5)
    coefficient_E = targets.top_logprobs_E.float().sin() + targets.top_anchor_E.cos()
    loss = (logprobs_N * targets.weights_N).sum() + (top_E * coefficient_E).sum()
    return loss / 100, {"loss/top": top_E.detach().sum()}


def _defined(
    layer: Any,
    hidden_N1H: Tensor,
    weight_VH: Tensor | None,
    pack: Pack,
    asked: LogprobRequest,
    held: bool,
) -> LogprobOutput:
    own_VH = layer.weight if weight_VH is None else weight_VH
    logits_NV = hidden_N1H.squeeze(1).float().matmul(own_VH.float().t()) / asked.temperature
    logits_NV = logits_NV[:, : asked.share.real]
    if pack.kept_NK is not None:
        inside_NV = torch.zeros(len(logits_NV), asked.share.real + 1, dtype=torch.bool)
        inside_NV.scatter_(1, pack.kept_NK % (asked.share.real + 1), True)
        logits_NV = logits_NV.masked_fill(~inside_NV[:, :-1], -torch.inf)
    logprobs_NV = logits_NV.log_softmax(1)
    entropy_N = -(logprobs_NV.exp() * logprobs_NV.clamp(min=-1e9)).sum(1)
    top_NM = None
    if asked.top:
        assert pack.top_NM is not None
        top_NM = logprobs_NV.gather(1, pack.top_NM.clamp(min=0)).where(pack.top_NM >= 0, 0.0)
    logprobs_N = logprobs_NV.gather(1, pack.labels_N[:, None]).squeeze(1)
    return LogprobOutput(logprobs_N, entropy_N, None, top_NM)


def _gradients(learner: Learner, reader: Reader) -> dict[str, Tensor]:
    """Gradients of the first update, from Adam's first moments."""
    found = {}
    seen = set[tuple[str, ...]]()
    for param in params(learner.shape):
        if param.hf in seen:  # the output layer of tied embeddings
            continue
        seen.add(param.hf)
        entry = reader.find(param, learner.shape)
        size = param.local_shape(Layout())
        moments = reader.read(entry, (0,) * len(size), size, "optimizer.state.exp_avg.")
        found[str(entry)] = moments.clone() / (1 - BETA)
    return found
