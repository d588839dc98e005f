"""Live engines of two formats with one wrong layer each, probed with a measured budget.

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
from tiny_engine import TinyModel, make_config, make_live, make_model, startable

from megatron_rl.batch import Batch, collate
from megatron_rl.config.schema import Format, Forward, LearnerSection, Precision, SyncSection
from megatron_rl.learner.learner import Learner
from megatron_rl.learner.modules import cpu  # noqa: F401 - before megatron
from megatron_rl.models.model import Model
from megatron_rl.train import probe_of
from megatron_rl.types import SamplingParams, Scored
from megatron_rl.weight_sync import probe

SEED = 3
# width and layers; times as large as the other activations
OUTLIERS = {
    (256, 4): (1, 16, 32, 64),
    (640, 6): (32,),
}
LINEAR = (
    *(f"self_attn.{one}_proj" for one in "qkvo"),
    *(f"mlp.{one}_proj" for one in ("gate", "up", "down")),
)
CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rows moved by one": lambda weight: weight.roll(1, 0),
    "zeroed": torch.zeros_like,
}
RIGHT = "none"
KERNELS = "kernels_not_rebuilt"


@dataclass(frozen=True)
class Stored(TinyModel):
    """A stored model, of which one tensor may be wrong."""

    victim: str = ""
    change: str = ""

    def weights(self, seed: int) -> dict[str, torch.Tensor]:
        weights = load_file(self.folder / "model.safetensors")
        if self.victim:
            weights[self.victim] = CHANGES[self.change](weights[self.victim])
        return weights


def make_random(folder: Path, hidden: int, layers: int) -> TinyModel:
    """Make a model of that width, with weights as large as trained ones."""
    return make_model(
        folder,
        tied=True,
        vocab_size=1000,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        head_dim=64,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 128,
    )


class BudgetCase:
    def __init__(self, folder: Path, format: Format, size: tuple[int, int] | None = None) -> None:
        folder.mkdir()
        self.live = make_live(folder, format, tied=True)
        model = self.live.model
        weights = model.weights(SEED)
        if size:
            model = self.live.model = make_random(folder / "hf", *size)
            weights = {name: model.untrained[name].bfloat16() for name in model.weights(SEED)}
        self.folder = model.folder
        self.hf = model.hf
        with startable():
            self.live.sampler.start()
        save_file(weights, self.folder / "model.safetensors", {"format": "pt"})

    @contextmanager
    def learner(self, folder: Path | None = None, **section: Any) -> Iterator[Learner]:
        folder = folder or self.folder
        config = make_config(self.live.format)
        learner = LearnerSection(**section)
        changed = replace(config, learner=learner)
        with closing(Learner(Model.read(folder, learner), changed)) as learner:
            learner.load_hf(folder)
            yield learner

    def answers(self) -> dict[str, Batch]:
        """Answers of the right engine, and with each fault."""
        right = Stored(self.folder, self.hf)
        found = {RIGHT: self._answers(right)}
        changes = cycle(CHANGES)
        for layer in range(self.hf.num_hidden_layers):
            for module, change in zip(LINEAR, changes, strict=False):
                victim = f"model.layers.{layer}.{module}.weight"
                found[victim] = self._answers(Stored(self.folder, self.hf, victim, change))
        if self.live.format == Format.int8:
            self.live.model = TinyModel(self.folder, self.hf)
            self.live.update(SEED + 1)
            found[KERNELS] = self._answers(right, KERNELS)
        return found

    def outlying(self, factor: int) -> tuple[Path, dict[str, Batch]]:
        """Answers of the model with outliers, right and with one wrong matrix in three places."""
        folder = self.folder.with_name(f"outliers_{factor}")
        layers = self.hf.num_hidden_layers
        with_outliers(self.folder, folder, factor, 2 if self.hf.hidden_size == 256 else 4)
        found = {RIGHT: self._answers(Stored(folder, self.hf))}
        victims = zip(
            (0, layers // 2, layers - 1),
            ("self_attn.q_proj", "mlp.gate_proj", "mlp.down_proj"),
            strict=True,
        )
        for (layer, module), change in zip(victims, cycle(CHANGES), strict=False):
            victim = f"model.layers.{layer}.{module}.weight"
            found[victim] = self._answers(Stored(folder, self.hf, victim, change))
        return folder, found

    def _answers(self, model: TinyModel, fault: str | None = None) -> Batch:
        self.live.model = model
        self.live.update(SEED, fault)
        rollouts = self.live.rollouts(params=SamplingParams(samples=2, max_tokens=12))
        return collate([Scored(one, reward=0.0) for one in rollouts])


def probed(learner: Learner, batch: Batch, format: Format) -> dict[str, Any]:
    logprobs_N = learner.logprobs(batch)
    expected_N = learner.expected_logprobs(batch)
    about = probe_of(
        int(batch.versions_B[0]), SyncSection(), learner, batch, logprobs_N, expected_N
    )
    given = (batch.sampler_logprobs_N, logprobs_N, batch.mask_N)
    budget = about.budget_of(format).nats
    found = {
        "noise": about.noise,
        "budget": budget,
        "d": probe.compare(*given, budget).mean_abs,
    }
    found |= {"expected": about.expected, "unexplained": about.unexplained}
    try:
        probe.check(*given, format, about)
    except probe.SyncMismatch as error:
        return found | {"said": str(error)}
    return found | {"said": ""}


def main() -> None:
    out = Path(sys.argv[1])
    found = {}
    for format in (Format.int8, Format.fp8):
        case = BudgetCase(out / format.value, format)
        with closing(case.live.sampler):
            answers = case.answers()
        for forward in Forward if format == Format.int8 else (Forward.bf16,):
            with case.learner(forward=forward) as learner:
                found[f"{format} {forward}"] = {
                    fault: probed(learner, batch, format) for fault, batch in answers.items()
                }
        for size, factors in OUTLIERS.items():
            case = BudgetCase(out / f"{format.value}_{size[0]}", format, size)
            with closing(case.live.sampler):
                outlying = {factor: case.outlying(factor) for factor in factors}
            for factor, (folder, answers) in outlying.items():
                for precision in Precision:
                    with case.learner(folder, precision=precision) as learner:
                        found[f"outliers {format} {size[0]} {factor} {precision}"] = {
                            fault: probed(learner, batch, format)
                            for fault, batch in answers.items()
                        }
    (out / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
