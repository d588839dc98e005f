"""Live engines of two formats with a wrong layer, one after the other, and what a probe with a measured budget says.

Writes JSON. A process of its own, in which the learner may change torch.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from outliers import with_outliers
from safetensors.torch import load_file, save_file
from tiny_engine import TinyModel, make_config, make_live, startable

from megatron_rl.config.schema import Format, Forward, LearnerSection, Precision, SyncSection
from megatron_rl.learner import host  # noqa: F401 - before megatron
from megatron_rl.learner.learner import Learner
from megatron_rl.learner.policy import Sections
from megatron_rl.models.model import Model
from megatron_rl.train import probe_of
from megatron_rl.types import Batch, SamplingParams, Scored, collate
from megatron_rl.weight_sync import probe

SEED = 3
OUTLIERS = 64  # times as large as the other activations
LINEAR = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj")
LINEAR = (*LINEAR, "mlp.up_proj", "mlp.down_proj")
CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rows moved by one": lambda weight: weight.roll(1, 0),
    "zeroed": torch.zeros_like,
}
RIGHT, KERNELS = "none", "kernels_not_rebuilt"


@dataclass(frozen=True)
class Faulty(TinyModel):
    """Of which one tensor is wrong."""

    victim: str = ""
    change: str = ""

    def weights(self, seed: int) -> dict[str, torch.Tensor]:
        return {
            name: CHANGES[self.change](weight) if name == self.victim else weight
            for name, weight in super().weights(seed).items()
        }


@dataclass(frozen=True)
class Outlying(TinyModel):
    """The same function with outliers in its activations; of which one tensor may be wrong."""

    victim: str = ""

    def weights(self, seed: int) -> dict[str, torch.Tensor]:
        assert seed == SEED
        weights = load_file(self.folder / "model.safetensors")
        return {name: weight.roll(1, 0) if name == self.victim else weight for name, weight in weights.items()}


class Case:
    def __init__(self, folder: Path, format: Format) -> None:
        folder.mkdir()
        self.live = make_live(folder, format, tied=True)
        self.right = self.live.model
        with startable():
            self.live.sampler.start()
        save_file(self.right.weights(SEED), folder / "hf" / "model.safetensors", {"format": "pt"})

    @contextmanager
    def learner(self, folder: Path | None = None, **section: Any) -> Iterator[Learner]:
        folder = folder or self.right.folder
        config, section = make_config(self.live.format), LearnerSection(**section)
        with closing(Learner(Model.read(folder, section), Sections.of(replace(config, learner=section)))) as learner:
            learner.load_hf(folder)
            yield learner

    def answers(self) -> dict[str, Batch]:
        """Of the engine as it should be, and with each fault."""
        found = {RIGHT: self._answers(self.right)}
        changes = cycle(CHANGES)
        for layer in range(self.right.hf.num_hidden_layers):
            for module, change in zip(LINEAR, changes, strict=False):
                victim = f"model.layers.{layer}.{module}.weight"
                wrong = Faulty(self.right.folder, self.right.hf, victim, change)
                found[f"layers.{layer}.{module} {change}"] = self._answers(wrong)
        if self.live.format == Format.int8:
            self.live.update(SEED + 1)
            found[KERNELS] = self._answers(self.right, KERNELS)
        return found

    def outlying(self) -> tuple[Path, dict[str, Batch]]:
        """Answers of the model with outliers, right and with one wrong matrix."""
        folder = self.right.folder.with_name("outliers")
        with_outliers(self.right.folder, folder, OUTLIERS, 2)
        victim = "model.layers.1.self_attn.q_proj.weight"
        models = {RIGHT: Outlying(folder, self.right.hf), victim: Outlying(folder, self.right.hf, victim)}
        return folder, {fault: self._answers(model) for fault, model in models.items()}

    def _answers(self, model: TinyModel, fault: str | None = None) -> Batch:
        self.live.model = model
        self.live.update(SEED, fault)
        rollouts = self.live.rollouts(params=SamplingParams(samples=2, max_tokens=12))
        return collate([Scored(one, reward=0.0) for one in rollouts])


def probed(learner: Learner, batch: Batch, format: Format) -> dict[str, Any]:
    logprobs_BT = learner.logprobs(batch)
    about = probe_of(int(batch.versions_B[0]), SyncSection(), learner, batch, logprobs_BT)
    floor = probe.above_floor(batch, logprobs_BT, learner.estimate_bf16_floor(batch))
    about = replace(about, floor=floor.get("sync/probe_floor"))
    given = (batch.sampler_logprobs_BT, logprobs_BT, batch.mask_BT)
    budget = about.budget_of(format).nats
    found = {"noise": about.noise, "budget": budget, "d": probe.compare(*given, budget).mean_abs}
    try:
        probe.check(*given, format, about)
    except probe.SyncMismatch as error:
        return found | {"said": str(error)}
    return found | {"said": ""}


def main() -> None:
    out, found = Path(sys.argv[1]), dict[str, Any]()
    for format in (Format.int8, Format.fp8):
        case = Case(out / format.value, format)
        with closing(case.live.sampler):
            answers = case.answers()
            folder, outlying = case.outlying() if format == Format.int8 else (None, {})
        for forward in Forward if format == Format.int8 else (Forward.bf16,):
            with case.learner(forward=forward) as learner:
                found[f"{format} {forward}"] = {
                    fault: probed(learner, batch, format) for fault, batch in answers.items()
                }
        for precision in Precision if outlying else ():
            with case.learner(folder, precision=precision) as learner:
                found[f"outliers {precision}"] = {
                    fault: probed(learner, batch, format) for fault, batch in outlying.items()
                }
    (out / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
