"""Achieved throughput of a step: tokens and floating-point operations a second of a device, and peak memory."""

from __future__ import annotations

import resource
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_rl.config.schema import Config, RolloutSource
from megatron_rl.learner.costs import operations
from megatron_rl.models.layout import Layout
from megatron_rl.models.model import Model
from megatron_rl.preflight.machine import Machine
from megatron_rl.preflight.roles import roles

GIB, TERA = 1 << 30, 1e12


@dataclass(frozen=True)
class Achieved:
    model: Model
    devices: int  # of the run; on hosts a process counts as one
    ranks: int
    peak: float | None  # operations a second of a device, where its kind is known
    sampled: bool

    @staticmethod
    def of(config: Config, machine: Machine) -> Achieved:
        model = Model.read(config.model.folder, config.learner)
        layout = Layout.from_config(config.learner)
        peak = machine.gpu.tflops * TERA if machine.gpu else None
        devices = roles(layout, config.sampler, machine.gpus).gpus
        return Achieved(model, devices, layout.world, peak, config.rollout.source == RolloutSource.sampler)

    def __call__(self, line: Mapping[str, float]) -> dict[str, float]:
        """`line`: a step's metrics, its times among them."""
        found: dict[str, float] = {}
        if self.sampled and "rollout/tokens" in line and line["time/step"] > 0:
            found["perf/tokens_per_s_per_device"] = line["rollout/tokens"] / line["time/step"] / self.devices
        seconds = line.get("time/update", 0.0)
        if "rollout/trained_tokens" in line and seconds > 0:
            rate = self._operations(line) / seconds / self.ranks
            found["perf/update_tflops_per_device"] = rate / TERA
            if self.peak:
                found["perf/update_mfu"] = rate / self.peak
        return found

    def _operations(self, line: Mapping[str, float]) -> float:
        """Forward and backward of an update, whatever is computed again not counted."""
        tokens, answers = line["rollout/trained_tokens"], line["rollout/n_trained"]
        each = operations(self.model, tokens / max(answers, 1))
        return 3 * (tokens * each.body + answers * line["rollout/response_tokens_mean"] * each.head)


def memory_peaks() -> dict[str, float]:
    """The most that rank 0 has held so far."""
    found = {"perf/host_memory_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB}
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        found["perf/device_memory_gib"] = torch.cuda.max_memory_allocated() / GIB
    return found
