"""Jobs of `learner_worker.py` about the output layer: columns of logits at a time, against logits
that are held.

N response tokens, H hidden width.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from learner_cases import make_batch, most_memory, with_kept
from torch import Tensor

from megatron_rl.learner.learner import Learner
from megatron_rl.learner.modules import costs, head
from megatron_rl.learner.modules.head import LogprobOutput, LogprobRequest
from megatron_rl.learner.modules.packing import Pack

COLUMNS = (1, 4, 7, 18)  # at once; a share has 19 (TP2, padded) or 37 of them


@contextmanager
def at_a_time(columns: int | None) -> Iterator[None]:
    """Limit logits to this number of columns at once; None: no change."""
    if columns is None:
        yield
        return
    with mock.patch.object(head, "logit_columns", return_value=columns):
        yield


def heads(learner: Learner, job: dict[str, Any]) -> list[dict[str, float]]:
    """Largest differences from full logits in values, gradients and supports, over all packs."""
    batch = with_kept(make_batch()) if job.get("kept") else make_batch()
    # pipeline stages and replicas have the same, or their own
    packs = learner._packs(learner.part(batch), torch.arange(len(batch)))
    found = []
    for policy in (module for module in learner.modules if module.post_process):
        for mine in packs:
            held = _both_ways(learner, policy, mine, None)
            for columns in COLUMNS:
                with at_a_time(columns):
                    parts = _both_ways(learner, policy, mine, columns)
                found.append({name: float((parts[name] - held[name]).abs().max()) for name in held})
                found[-1]["size"] = float(held["of_weight"].abs().max())
                found[-1]["padding"] = float(parts["of_weight"][learner.share.real :].abs().sum())
    return found


def _both_ways(learner: Learner, policy: Any, mine: Pack, columns: int | None) -> dict[str, Tensor]:
    rollout = learner.rollout
    random = torch.Generator().manual_seed(5)
    layer = policy.output_layer
    own = (
        policy.shared_embedding_or_output_weight()
        if policy.share_embeddings_and_output_weights
        else layer.weight
    )
    count = len(mine.labels_N)
    width = own.shape[1]
    hidden_N1H = torch.randn(count, 1, width, generator=random).to(own.dtype).requires_grad_()
    weight_VH = own.detach().clone().requires_grad_()
    asked = LogprobRequest(learner.share, rollout.temperature, True, rollout.top_k, rollout.top_p)
    forwards = []
    hook = layer.register_forward_hook(lambda *_: forwards.append(1))
    got: LogprobOutput = head.scores(layer, hidden_N1H, weight_VH, mine, asked, held=False)
    hook.remove()
    assert (not forwards) == (columns is not None), "columns at a time do not go through the layer"
    of_logprobs_N, of_entropy_N = torch.randn(2, count, generator=random)
    ((got.logprobs_N * of_logprobs_N).sum() + (got.entropy_N * of_entropy_N).sum()).backward()
    found = {"logprobs": got.logprobs_N, "entropy": got.entropy_N}
    found |= {"of_hidden": hidden_N1H.grad.float(), "of_weight": weight_VH.grad.float()}
    if got.truncation is not None:
        found |= {
            "outside": got.truncation.outside_N.float(),
            "log_mass": got.truncation.log_mass_N,
        }
    return {name: value.detach() for name, value in found.items()}


def head_memory(learner: Learner, job: dict[str, Any]) -> dict[str, float]:
    """Bytes of a forward and backward pass through the output layer but for its gradients, over
    BF16 logits; all is an eighth as long and as wide as 4,096 tokens with 151,936 columns of a
    model 4,096 wide.
    """
    tokens = 512
    columns = learner.shape.vocab
    hidden = learner.shape.hidden
    limits = {
        "LOGIT_BYTES": costs.LOGIT_BYTES // 64,
        "LEAST_COLUMNS": 128,
        "HOST_BYTES": costs.HOST_BYTES // 16,
    }
    layer = learner.modules[0].output_layer
    hidden_N1H = torch.randn(tokens, 1, hidden).bfloat16().requires_grad_()
    weight_VH = (torch.randn(columns, hidden) / 8).bfloat16().requires_grad_()
    mine = SimpleNamespace(labels_N=torch.zeros(tokens, dtype=torch.int64), kept_NK=None)
    asked = LogprobRequest(head.VocabShare.of(0, 1, columns, columns, None), 1.0)

    def both_ways(held: bool) -> None:
        hidden_N1H.grad = weight_VH.grad = None
        got = head.scores(layer, hidden_N1H, weight_VH, mine, asked, held)
        (got.logprobs_N - 0.1 * got.entropy_N).sum().backward()

    logits = 2 * tokens * columns
    gradients = 2 * hidden * (tokens + columns)
    with mock.patch.multiple(costs, **limits):
        most = {
            name: most_memory(lambda held=held: both_ways(held))
            for name, held in (("held", True), ("not", False))
        }
    return {"held": most["held"] / logits, "not": (most["not"] - gradients) / logits}
