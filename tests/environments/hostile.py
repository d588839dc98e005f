"""Well-behaved and faulty environments, tools and agents for `environment.name` in tests."""

import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from typing import Any

from megatron_rl.environments.environment import Answer, Environment, Step


class Guess(Environment):
    """Ends with a right answer or the last try; first does what the row's `how` requests."""

    def __init__(self, tries: int = 3) -> None:
        self.tries = tries
        self.turn = 0
        self.tools = (
            add,
            self.wait,
            self.die,
            self.flood,
            self.raises,
            self.nothing,
            self.odd,
            self.turns_so_far,
        )
        self.tools += (self.interrupts,)

    def reset(self, row: Mapping[str, Any]) -> Any:
        self.row = row
        self.how = row.get("how", "")
        if self.how == "reset raises":
            raise ValueError("no such task")
        if self.how == "reset hangs":
            time.sleep(600)
        if self.how == "a long start":
            return [{"role": "x" * (5 << 20), "content": row["prompt"]}]
        return [{"role": "user", "content": row["prompt"]}]

    def step(self, answer: Answer) -> Any:
        self.turn += 1
        match self.how:
            case "hangs":
                time.sleep(600)
            case "hangs on":
                signal.signal(signal.SIGALRM, signal.SIG_IGN)
                time.sleep(600)
            case "swallows":
                try:
                    time.sleep(600)
                except Exception:
                    return Step(reward=1.0, done=True)
            case "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            case "dies once" if not os.path.exists(self.row["mark"]):
                open(self.row["mark"], "w").close()
                os._exit(3)
            case "raises":
                raise RuntimeError("half a pair \ud800")
            case "nothing":
                return None
            case "no message":
                return Step(done=False)
            case "nan":
                return Step("Again.", float("nan"), True)
            case "patches":
                json.dumps = lambda *_, **__: "null"
            case "long fields":
                return Step([{"role": "x" * (5 << 20), "content": "Not yet."}])
            case "long calls":
                return Step([{"role": "assistant", "tool_calls": ["x" * (5 << 20)]}])
            case "forks":
                if os.fork() == 0:
                    return Step(done=True, reward=7.0)
            case "leaves a child":
                if os.fork() == 0:
                    time.sleep(600)
            case "floods":
                return Step("x" * (100 << 20), 0.0, self.turn == self.tries)
            case "prints":
                sys.stdout.write("x" * (8 << 20))
            case "memory":
                bytearray(64 << 30)
        right = answer.content.strip() == str(self.row["answer"])
        done = right or self.turn == self.tries
        advantage = 2.0 if right else -1.0
        numbers = {"tries": self.turn, "rate": float("nan")}  # of no tries, as such numbers are
        return Step("Not yet. Again.", float(right), done, numbers, advantage)

    def wait(self, seconds: float) -> str:
        """Wait."""
        time.sleep(seconds)
        return "waited"

    def die(self) -> str:
        """Die."""
        os.kill(os.getpid(), signal.SIGKILL)
        return ""

    def flood(self) -> str:
        """A long text."""
        return "x" * (100 << 20)

    def raises(self) -> str:
        """Raise."""
        raise KeyError("nothing there")

    def interrupts(self) -> str:
        """Raise what ends a program."""
        raise KeyboardInterrupt

    def nothing(self) -> Any:
        """Return no text."""
        return None

    def odd(self) -> Any:
        """Return what is no JSON."""
        return {(1, 2): 3}

    def turns_so_far(self) -> int:
        """The number of steps before."""
        return self.turn


def add(a: int, b: int = 1) -> int:
    """Add two numbers."""
    return a + b


class WithoutStep:
    def reset(self, row: Any) -> str:
        return "Hm?"


async def agent(base_url: str, row: Mapping[str, Any]) -> Any:
    """Asks for two answers with OpenAI's own client."""
    from openai import AsyncOpenAI

    client = AsyncOpenAI(timeout=row.get("timeout", 60), max_retries=row.get("retries", 0))
    messages: list[Any] = [{"role": "user", "content": row["prompt"]}]
    said = []
    for _ in range(2):
        made = await client.chat.completions.create(model="policy", messages=messages)
        message = made.choices[0].message
        said.append(message.content)
        messages += [message.model_dump(exclude_none=True), {"role": "user", "content": "Again."}]
    return {
        "reward": float(str(row["answer"]) in said),
        "answers": len(said),
        "rate": float("inf"),
        "note": "done",
    }
