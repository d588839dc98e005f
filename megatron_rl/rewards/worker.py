"""One reward worker: JSON lines in, JSON lines out. Started by `pool.py`, never by hand.

The first line names the reward; each further line is one task. What a reward prints goes to stderr,
so that it cannot be taken for an answer.
"""

from __future__ import annotations

import json
import math
import os
import sys
from contextlib import redirect_stdout

import msgspec

from megatron_rl.process import die_with_parent
from megatron_rl.rewards.functions import resolve

MAX_ERROR = 500  # characters: a window of replies must fit a pipe


def main() -> None:
    die_with_parent()  # a reward that hangs does not see the end of its input
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    start = json.loads(sys.stdin.readline())
    sys.path[:0] = start["path"]
    with redirect_stdout(sys.stderr):
        reward = resolve(start["name"])
        answers.write(json.dumps({"ready": True}) + "\n")
        for line in sys.stdin:
            task = msgspec.json.decode(line)
            try:
                score = float(reward(task["row"], task["answer_key"], task["response"]))
                reply: dict[str, float | str] = {"score": score}
                if not math.isfinite(score):
                    reply = {"error": f"the score is {score}"}
            except Exception as error:  # a reward is user code: whatever it raises is its result
                reply = {"error": f"{type(error).__name__}: {error}"[:MAX_ERROR]}
            answers.write(json.dumps(reply) + "\n")


if __name__ == "__main__":
    try:
        main()
    except (KeyboardInterrupt, BrokenPipeError):
        pass
    except LookupError as problem:
        print(json.dumps({"error": str(problem)}), flush=True)
