"""Environment `Calculator`: questions with one number as answer, and an integer calculator."""

import ast
import operator
from collections.abc import Callable, Mapping, Sequence

from megatron_rl.environments.environment import Answer, Environment, Message, Step, Tool

OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}
MOST_CHARACTERS = 200  # of an expression
MOST_DIGITS = 100  # of any intermediate number


def calculate(expression: str) -> str:
    """Calculate with whole numbers: +, - and *, with parentheses, such as 12*(34+5)."""
    if len(expression) > MOST_CHARACTERS:
        raise ValueError(
            f"the expression has {len(expression)} characters, at most {MOST_CHARACTERS}"
        )
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, MemoryError, RecursionError):
        raise ValueError("this is no expression of whole numbers with +, - and *") from None
    return str(_value(tree.body))


def _value(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int() as value) if not isinstance(value, bool):
            return _bounded(value)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            return _bounded(OPERATORS[type(op)](_value(left), _value(right)))
    raise ValueError("only whole numbers, +, -, * and parentheses can be calculated")


def _bounded(value: int) -> int:
    if abs(value) >= 10**MOST_DIGITS:
        raise ValueError(f"a number has more than {MOST_DIGITS} digits")
    return value


class Calculator(Environment):
    """Question with reward 1 if the final number is the row's answer, else 0.

    `own_reward: false` leaves the reward to the recipe; `instruction` is appended to each question.
    """

    tools: Sequence[Tool] = (calculate,)

    def __init__(self, own_reward: bool = True, instruction: str = "") -> None:
        self._own_reward = own_reward
        self._instruction = instruction
        self._answer = ""

    def reset(self, row: Mapping[str, object]) -> Sequence[Message]:
        prompt = row["prompt"]
        if isinstance(prompt, str):
            messages = [{"role": "user", "content": prompt}]
        else:
            messages = list(prompt)  # type: ignore[call-overload]
        if self._instruction:
            last = messages[-1]
            messages[-1] = {**last, "content": f"{last['content']}\n\n{self._instruction}"}
        self._answer = str(row.get("answer", "")).strip()
        return messages

    def step(self, answer: Answer) -> Step:
        right = answer.content.strip() == self._answer
        return Step(done=True, reward=float(right) if self._own_reward else None)
