"""A run whose engine shares devices with the learner: who takes memory when, on two real ranks and
a real engine.

`python test_sleeping_engine.py RECIPE RUN_DIR` is one of them, and prints what it does, and when.
Hosts have no sleep: vLLM's engine takes the calls there and frees nothing, the order is the one of
GPUs.
"""

import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import wraps
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from preloaded import run

from megatron_rl.config import load, to_yaml
from megatron_rl.data.toy import write_toy

pytestmark = [pytest.mark.engine, pytest.mark.ranks]
ROOT = Path(__file__).parent.parent
RECIPE = """
base: {root}/recipes/quickstart.yaml
run: {{steps: 2, name: sleeps}}
model: {{path: {folder}/toy/model, init: random}}
data: {{train: {folder}/toy/train.jsonl, eval: {folder}/toy/test.jsonl}}
rollout: {{prompts_per_step: 8, samples_per_prompt: 4, max_gen_batches: 1, dynamic_sampling: false}}
sampler: {{sleep: {mode}, vllm: {{max_num_seqs: 32}}}}
eval: {{every: 0}}
log: {{record_every: 0}}
"""
Done = tuple[float, str]


def print_calls(owner: Any, name: str) -> None:
    """Print each call after it has returned."""
    true = getattr(owner, name)

    @wraps(true)
    def printed(*args: Any, **named: Any) -> Any:
        answer = true(*args, **named)
        what = [str(one) for one in args if isinstance(one, int | list)]
        print(
            "DID",
            f"{time.monotonic():.6f}",
            " ".join([name.strip("_"), *what]),
            flush=True,
        )
        return answer

    setattr(owner, name, printed)


def main(recipe: Path, run_dir: Path) -> None:
    from megatron_rl import train
    from megatron_rl.learner import parallel, policy
    from megatron_rl.sampler.sampler import Sampler

    for name in ("launch", "sleep", "wake", "finish_weight_update", "generate"):
        print_calls(Sampler, name)
    print_calls(parallel, "_device")
    print_calls(policy, "build")
    config = load(recipe)
    train.train(config, to_yaml(config), run_dir, int(os.environ["RANK"]))


@pytest.fixture(scope="module", params=["discard", "offload"])
def ranks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[int, list[list[Done]]]:
    """vLLM's level of sleep, and what each rank did."""
    folder = tmp_path_factory.mktemp(request.param)
    write_toy(folder / "toy")
    (folder / "sleeps.yaml").write_text(
        RECIPE.format(
            root=ROOT,
            folder=folder,
            mode=request.param,
        )
    )

    def rank(number: int) -> CompletedProcess[str]:
        place = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
        place["MEGATRON_RL_RENDEZVOUS"] = f"file://{folder}/meeting"
        command = [sys.executable, __file__, folder / "sleeps.yaml", folder / "run"]
        env = {**os.environ, **{name: str(value) for name, value in place.items()}}
        return run("megatron", command, cwd=folder, env=env, timeout=300)

    with ThreadPoolExecutor() as threads:
        found = list(threads.map(rank, range(2)))
    for one in found:
        assert one.returncode == 0, one.stdout[-2000:] + one.stderr[-4000:]
    words = [
        [line.split(maxsplit=2) for line in one.stdout.splitlines() if line.startswith("DID ")]
        for one in found
    ]
    level = {"offload": 1, "discard": 2}[request.param]
    return level, [[(float(when), what) for _, when, what in one] for one in words]


def test_the_engine_sleeps_before_any_rank_touches_its_device(
    ranks: tuple[int, list[list[Done]]],
) -> None:
    level, (driver, follower) = ranks
    begins = ["launch", f"sleep {level}", "device", "build", "wake ['weights']"]
    assert [what for _, what in driver[:5]] == begins
    asleep = driver[1][0]
    assert [what for _, what in follower] == ["device", "build"]
    assert all(when > asleep for when, _ in follower)


def test_it_wakes_for_each_sync_and_sleeps_while_the_learner_works(
    ranks: tuple[int, list[list[Done]]],
) -> None:
    level, (driver, _) = ranks
    sync = ["wake ['weights']", "finish_weight_update", "wake ['kv_cache']"]
    calls = [what for _, what in driver[4:] if what != "generate"]
    assert calls == [*sync, f"sleep {level}", *sync, f"sleep {level}", *sync]


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
