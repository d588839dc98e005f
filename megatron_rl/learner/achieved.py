"""Metrics of a step: tokens and operations a second of a device, MFU; and peaks of memory."""

import resource
import sys
from dataclasses import dataclass

from megatron_rl.learner.modules.costs import operations
from megatron_rl.models.model import Model
from megatron_rl.types import Metrics

GIB = 1 << 30
TERA = 1e12


@dataclass(frozen=True)
class Achieved:
    model: Model
    devices: int  # of the run; on CPUs a process counts as one
    peak_tflops: float | None  # of a device; None: not known
    sampled: bool

    def __call__(self, line: Metrics) -> Metrics:
        """`line`: a step's metrics, its times among them."""
        found: Metrics = {}
        if self.sampled and "rollout/tokens" in line and line["time/step"] > 0:
            found["perf/tokens_per_s_per_device"] = (
                line["rollout/tokens"] / line["time/step"] / self.devices
            )
        seconds = line.get("time/update", 0.0)
        if "rollout/trained_tokens" in line and seconds > 0:
            # forward and backward, without recomputation
            tokens = line["rollout/trained_tokens"]
            answers = line["rollout/n_trained"]
            each = operations(self.model, tokens / max(answers, 1))
            made = 3 * (
                tokens * each.body + answers * line["rollout/response_tokens_mean"] * each.head
            )
            rate = made / seconds / self.model.layout.world
            found["perf/update_tflops_per_device"] = rate / TERA
            if self.peak_tflops:
                found["perf/update_mfu"] = rate / (self.peak_tflops * TERA)
        return found


def memory_peaks() -> Metrics:
    """Return the peak memory of rank 0 so far."""
    found = {
        "perf/host_memory_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB
    }
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        found["perf/device_memory_gib"] = torch.cuda.max_memory_allocated() / GIB
    return found
