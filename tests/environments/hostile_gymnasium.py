"""A gymnasium environment that gives back what no gymnasium environment should."""

import os
from typing import Any


class Unprintable:
    def __str__(self) -> str:
        raise RuntimeError("no text")


class Odd(float):
    def __float__(self) -> float:
        raise KeyboardInterrupt


class Liar(dict[str, Any]):
    def items(self) -> Any:
        raise SystemExit(3)


STEPS: dict[str, Any] = {
    "fine": lambda: ("seen", 1.0, True, False, {"laps": 2}),
    "none": lambda: None,
    "four": lambda: ("seen", 1.0, True, False),
    "nan": lambda: ("seen", float("nan"), True, False, {}),
    "infinite": lambda: ("seen", float("inf"), True, False, {}),
    "a text as reward": lambda: ("seen", "much", True, False, {}),
    "an odd reward": lambda: ("seen", Odd(1.0), True, False, {}),
    "no text": lambda: (Unprintable(), 1.0, True, False, {}),
    "odd info": lambda: ("seen", 1.0, True, False, Liar(a=1)),
    "half a pair": lambda: ("\ud800", 1.0, False, False, {}),
    "raises": lambda: 1 / 0,
    "ends its process": lambda: os._exit(3),
}


class Environment:
    def reset(self, **more: Any) -> tuple[str, dict[str, Any]]:
        return "Begin.", {}

    def step(self, action: str) -> Any:
        return STEPS[action]()
