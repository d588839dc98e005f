"""Runs the real loop for a list of cases on one learner rank and one engine: `python loop_cases.py
FOLDER CASES_JSON`.

A case is a list of overrides of sections that the loop reads at every step (correction, loss,
advantage). Prints one JSON line per case: the metrics of its steps, and how far the policy moved.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_rl.config import load, to_yaml
from megatron_rl.learner.state import LearnerState
from megatron_rl.processes import heartbeat
from megatron_rl.tracking.alarms import Alarms
from megatron_rl.tracking.timeline import Span


class Kept:
    """Keeps what the loop logs."""

    def __init__(self) -> None:
        self.lines: list[dict[str, float]] = []
        self.alarms = Alarms({})
        self.phase = heartbeat.phase

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.lines.append(dict(metrics))

    def spans(self, spans: Sequence[Span]) -> None:
        pass

    def ledger(self, step: int, drawn: tuple[int, int], trained: Sequence[int]) -> None:
        pass


def main(folder: Path, cases: dict[str, list[str]]) -> None:
    from megatron_rl.checkpoint.saver import Saver
    from megatron_rl.config.schema import CheckpointSection
    from megatron_rl.driver import Driver
    from megatron_rl.learner.learner import Learner
    from megatron_rl.models.model import Model
    from megatron_rl.rank0 import Rank0
    from megatron_rl.rollout.collect import sampling_params
    from megatron_rl.tracking.progress import Progress
    from megatron_rl.train import load_policy, loop
    from megatron_rl.weight_sync.push import WeightSync

    recipe = folder / "loop.yaml"
    base = load(recipe)
    with Driver(base, to_yaml(base), folder / "run") as driver:
        model = Model.read(base.model.path, base.learner)
        learner = Learner(model, base)
        load_policy(learner, base.model, base.run.seed, base.loss.kl_coef)
        rank0 = Rank0(driver)
        rank0.connect(learner)
        sync = WeightSync(learner, driver.sampler, base)
        saver = Saver(
            folder / "run" / "checkpoints",
            CheckpointSection(),
            LearnerState(learner),
            sync,
        )
        try:
            for number, (name, overrides) in enumerate(cases.items()):
                done = number * (base.run.steps + 1)  # policy versions only ever grow
                config = load(recipe, [*overrides, f"run.steps={done + base.run.steps}"])
                for section in ("loss", "correction", "run", "learner", "rollout"):
                    setattr(learner, section, getattr(config, section))
                drawn = sampling_params(config.rollout, driver._scorer.tokenizer.stop_token_ids)
                driver._collector._params = driver._probe_params = drawn
                driver._collector._config = config.rollout
                driver.recorder = Kept()
                before = [parameter.detach().clone() for _, parameter in learner.named_parameters()]
                loop(config, rank0, learner, sync, saver, Progress(done))
                moved = sum(
                    float((parameter.detach() - old).abs().sum())
                    for old, (_, parameter) in zip(before, learner.named_parameters(), strict=True)
                )
                print(
                    "CASE "
                    + json.dumps({"name": name, "moved": moved, "lines": driver.recorder.lines}),
                    flush=True,
                )
        finally:
            sync.close()
            learner.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
