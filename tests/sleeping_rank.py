"""One rank of a run whose engine sleeps: `python sleeping_rank.py RECIPE RUN_DIR`. Prints what it does, and when.

Hosts have no sleep: vLLM's engine takes the calls there and frees nothing, the order is the one of GPUs.
"""

import os
import sys
import time
from functools import wraps
from pathlib import Path
from typing import Any

from megatron_rl.config import load, to_yaml


def told(owner: Any, name: str) -> None:
    """The call is printed once it has returned."""
    true = getattr(owner, name)

    @wraps(true)
    def telling(*args: Any, **named: Any) -> Any:
        answer = true(*args, **named)
        what = [str(one) for one in args if isinstance(one, int | list)]
        print("DID", f"{time.monotonic():.6f}", " ".join([name.strip("_"), *what]), flush=True)
        return answer

    setattr(owner, name, telling)


def main(recipe: Path, run_dir: Path) -> None:
    from megatron_rl import train
    from megatron_rl.learner import parallel, policy
    from megatron_rl.sampler.sampler import Sampler

    for name in ("launch", "sleep", "wake", "finish_weight_update", "generate"):
        told(Sampler, name)
    told(parallel, "_device")
    told(policy, "build")
    config = load(recipe)
    train.train(config, to_yaml(config), run_dir, int(os.environ["RANK"]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
