"""TRL's side of step.py, in a process that imports nothing of this project: a GRPO step for each
line of its input.

Its settings are the fastest that were found to mean the same: no reference, one update of one whole
batch, no recomputation, AdamW in one kernel, a dynamic cache. `precision`: `float32`; `autocast`,
which multiplies in BF16 and generates in FP32; `bfloat16`, all of it, the optimizer included.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any


def varied(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """A reward that costs nothing and differs within every group."""
    return [float(sum(map(ord, completion)) % 8) / 8 for completion in completions]


def main(asked: dict[str, Any]) -> None:
    import torch

    torch.set_num_threads(asked["threads"])
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    precision = asked["precision"]
    config = GRPOConfig(
        output_dir=asked["folder"],
        max_steps=1 << 30,
        per_device_train_batch_size=asked["prompts"] * asked["samples"],
        num_generations=asked["samples"],
        max_completion_length=asked["response_tokens"],
        learning_rate=1e-6,
        beta=0.0,
        num_iterations=1,
        temperature=1.0,
        optim="adamw_torch_fused",
        bf16=precision == "autocast",
        gradient_checkpointing=False,
        model_init_kwargs={"dtype": "bfloat16" if precision == "bfloat16" else "float32"},
        use_cpu=True,
        dataloader_pin_memory=False,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )

    class Timed(GRPOTrainer):
        rollout_s = 0.0

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            start = time.perf_counter()
            made = super()._generate_and_score_completions(inputs)
            self.rollout_s = time.perf_counter() - start
            assert made["completion_ids"].shape[1] == asked["response_tokens"]
            assert bool(made["completion_mask"].all())
            return made

    class Turn(TrainerCallback):
        start = 0.0

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            if not sys.stdin.readline():
                raise SystemExit
            self.start = time.perf_counter()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            step_s = time.perf_counter() - self.start
            seconds = {
                "step": step_s,
                "rollout": trainer.rollout_s,
                "update": step_s - trainer.rollout_s,
            }
            print("seconds", json.dumps(seconds), flush=True)

    trainer = Timed(
        asked["model"],
        reward_funcs=varied,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in asked["texts"]]),
        processing_class=AutoTokenizer.from_pretrained(asked["model"], padding_side="left"),
        callbacks=[Turn()],
    )
    trainer.train()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "settings", type=json.loads, metavar="JSON", help="as tools/bench/step.py writes them"
    )
    main(parser.parse_args().settings)
