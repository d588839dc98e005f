"""Case of test_device_experts.py: requests pass the parts of vLLM that tell experts on GPUs, which
are plain torch.
"""

import json
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm import SamplingParams
from vllm.distributed.aux_output_connector import worker
from vllm.distributed.aux_output_connector.connector import AuxOutputSchedulerConnector
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.fused_moe import routed_experts_capturer
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request

from megatron_rl.engine.candidates import CandidateRequest
from megatron_rl.engine.generation import Sample

LAYERS = 4
CHOSEN = 2
BLOCK = 16
PROMPT = list(range(40))


class Router(torch.nn.Module):
    """Router that implements vLLM's RoutedExpertsCaptureSource."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer_id = layer
        self.capture_fn = None


class Device:
    """A worker and a scheduler of vLLM's, as far as experts go through them, and one
    request after another.
    """

    def __init__(self, model: str) -> None:
        arguments = EngineArgs(
            model, skip_tokenizer_init=True, max_model_len=64, block_size=BLOCK, max_num_seqs=4
        )
        config = arguments.create_engine_config()
        self.routers = torch.nn.ModuleList(Router(layer) for layer in range(LAYERS))
        cache = KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=[])
        self.worker = worker.AuxOutputWorkerConnector(
            vllm_config=config, model=self.routers, kv_cache_config=cache
        )
        self.scheduler = AuxOutputSchedulerConnector()
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK, sha256)
        self._random = torch.Generator().manual_seed(0)

    def answer(
        self, name: str, parts: list[int], tokens: int, cached: int = 0
    ) -> tuple[np.ndarray, Sample]:
        """Read the prompt in these parts, what is cached aside, and answer; what was chosen for
        what was read.
        """
        request = Request(
            name, PROMPT, SamplingParams(max_tokens=tokens), None, block_hasher=self._hasher
        )
        sample = Sample(1, CandidateRequest(), {"tokens": PROMPT})
        chosen = []
        read = cached
        for part in [*parts, *[1] * (tokens - 1)]:
            chosen.append(
                torch.randint(
                    4,
                    (part, LAYERS, CHOSEN),
                    generator=self._random,
                )
            )
            drawn = read + part == request.num_tokens
            out = self._step(request, read, chosen[-1], drawn)
            read += part
            if drawn:
                request.append_output_token_ids(len(sample.token_ids))
                routed = self.scheduler.take_output(request, out)
                new = [request.output_token_ids[-1]]
                sample.take(
                    SimpleNamespace(new_token_ids=new, new_logprobs=None, routed_experts=routed), 0
                )
        self.scheduler.request_finished(request)
        return torch.cat(chosen).numpy(), sample

    def _step(self, request: Any, read: int, chosen_SLK: torch.Tensor, drawn: bool) -> Any:
        part = len(chosen_SLK)
        scheduled = SimpleNamespace(num_scheduled_tokens={request.request_id: part})
        self.worker.begin_step(
            self.scheduler.build_connector_meta(scheduled, {request.request_id: request})
        )
        for layer, router in enumerate(self.routers):
            router.capture_fn(chosen_SLK[:, layer])
        starts = {
            "query_start_loc_np": np.array([0, part]),
            "num_computed_tokens_np": np.array([read]),
        }
        pending = self.worker.prepare_output(
            SimpleNamespace(req_ids=[request.request_id], **starts)
        )
        pending.enqueue_cpu_copy(np.array([int(drawn)]), np.array([0]))
        return pending.process_output()


def _reported(sample: Sample) -> list[Any]:
    experts_SLK = sample.expert_choices()
    assert experts_SLK is not None
    return experts_SLK.tolist()


def main() -> None:
    """Compare reported and chosen experts for a prompt that is prefilled in chunks smaller than a
    block, after a cached prefix, and at once.
    """
    # alone, outside of a forward pass
    worker.get_tp_group = lambda: SimpleNamespace(is_first_rank=True)
    routed_experts_capturer.get_forward_context = lambda: SimpleNamespace(dp_metadata=None)
    device = Device(sys.argv[1])
    first, in_parts = device.answer("first", [10, 23, 7], 20)
    again, behind = device.answer("again", [8], 12, cached=32)
    whole, at_once = device.answer("whole", [40], 1)
    chosen = [
        first.tolist(),
        [*first[:32].tolist(), *again.tolist()],
        whole.tolist(),
    ]
    device.worker.close()
    print(
        json.dumps(
            {
                "chosen": chosen,
                "reported": [_reported(sample) for sample in (in_parts, behind, at_once)],
            }
        )
    )


if __name__ == "__main__":
    main()
