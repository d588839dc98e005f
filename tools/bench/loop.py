"""Rollout throughput inside the loop against the bare engine on the same prompts.

    python tools/bench/loop.py [--model runs/toy_sft/model] [--data data/toy/train.jsonl] [--repeats
    5]

"Inside the loop" is everything the step's rollout phase does: drawing prompts, generating with a
seed per request, decoding and scoring the answers, collating the batch. The bare engine is
`vllm.LLM.generate` with the same weights (BF16), the same prompts and the same sampling parameters,
without seeds. The two take turns.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from megatron_rl.batch import collate
from megatron_rl.config.schema import Config, DataSection, RolloutSection, SamplerSection
from megatron_rl.data.prompts import Dataset, FolderTokenizer, PromptOrder, load_dataset
from megatron_rl.models.hf_folder import HfFolder
from megatron_rl.rewards.pool import RewardPool
from megatron_rl.rollout.collect import Collector, Scorer
from megatron_rl.sampler.client.engine_process import engine_environment
from megatron_rl.sampler.engine_settings import EngineSettings, engine_arguments
from megatron_rl.sampler.sampler import Sampler
from megatron_rl.weight_sync.file_transport import update_info, write_version

ROLLOUT = RolloutSection(
    prompts_per_step=256,
    samples_per_prompt=8,
    max_prompt_tokens=12,
    max_response_tokens=8,
    dynamic_sampling=False,
)


def serve_bare(arguments: dict[str, Any]) -> None:
    """Prompts as a JSON line in, (seconds, tokens) as a line out."""
    from vllm import LLM, SamplingParams

    stop = arguments.pop("stop")
    llm = LLM(**arguments)
    params = SamplingParams(
        n=ROLLOUT.samples_per_prompt,
        max_tokens=ROLLOUT.max_response_tokens,
        stop_token_ids=stop,
        logprobs=0,
        detokenize=False,
    )
    for line in sys.stdin:
        inputs: Any = [{"prompt_token_ids": ids} for ids in json.loads(line)]
        start = time.perf_counter()
        outputs = llm.generate(inputs, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        tokens = sum(len(one.token_ids) for output in outputs for one in output.outputs)
        print(f"bare {seconds} {tokens}", flush=True)


def ask_bare(process: subprocess.Popen[str], prompts: list[list[int]]) -> float:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(prompts) + "\n")
    process.stdin.flush()
    for line in process.stdout:
        if line.startswith("bare "):
            _, seconds, tokens = line.split()
            return float(tokens) / float(seconds)
    raise RuntimeError("the bare engine ended")


def give_weights(sampler: Sampler, model: Path, folder: Path) -> None:
    hf = HfFolder(model)
    write_version(
        folder,
        0,
        ((name, hf.get(name)) for name in hf.names),
        format="none",
    )
    sampler.init_weight_transfer_engine({})
    sampler.start_weight_update()
    sampler.update_weights(update_info(folder, 0, 1))
    sampler.finish_weight_update("0")


def measure(
    config: Config, model: Path, dataset: Dataset, tokenizer: FolderTokenizer, repeats: int
) -> None:
    rewards = RewardPool(config.reward)
    rewards.start()
    ours: list[float] = []
    bare: list[float] = []
    alone: list[float] = []  # generation without drawing, scoring and collating
    settings = EngineSettings.from_config(config)
    with tempfile.TemporaryDirectory() as name, Sampler(settings, model, Path(name)) as sampler:
        give_weights(sampler, model, Path(name))
        arguments = engine_arguments(settings, model) | {"load_format": "auto"}
        arguments["stop"] = list(tokenizer.stop_token_ids)
        process = subprocess.Popen(
            [sys.executable, __file__, "--bare", json.dumps(arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=engine_environment(),
        )
        try:
            order = PromptOrder(dataset, config.run.seed)
            scorer = Scorer(config.reward, rewards, tokenizer)
            collector = Collector(
                config.rollout, order, sampler, scorer, rebaseline=True, seed=config.run.seed
            )
            for repeat in range(repeats + 1):
                before = sampler.stats
                start = time.perf_counter()
                collected = collector.collect(repeat)
                collate(collected.scored)
                seconds = time.perf_counter() - start
                firsts = [one.rollout for one in collected.scored if one.rollout.sample == 0]
                rate = ask_bare(process, [list(rollout.prompt.token_ids) for rollout in firsts])
                if repeat:  # the first round is warm-up
                    ours.append(collected.metrics["rollout/tokens"] / seconds)
                    bare.append(rate)
                    after = sampler.stats
                    alone.append((after.tokens - before.tokens) / (after.seconds - before.seconds))
        finally:
            process.kill()
            process.wait()
            rewards.close()
    print(f"in the loop {median(ours):.0f} tokens/s   bare {median(bare):.0f} tokens/s", end="   ")
    print(f"ratio {median(a / b for a, b in zip(ours, bare, strict=True)):.3f}", end="   ")
    print(f"generation alone {median(a / b for a, b in zip(alone, bare, strict=True)):.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, default=Path("runs/toy_sft/model"))
    parser.add_argument("--data", default="data/toy/train.jsonl")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--bare", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.bare:
        serve_bare(json.loads(options.bare))
        return
    sampler = SamplerSection(vllm={"max_num_seqs": 1024})
    config = Config(data=DataSection(train=options.data), rollout=ROLLOUT, sampler=sampler)
    tokenizer = FolderTokenizer(options.model)
    dataset = load_dataset("train", config.data, tokenizer, ROLLOUT.max_prompt_tokens)
    measure(config, options.model, dataset, tokenizer, options.repeats)


if __name__ == "__main__":
    main()
