"""Countdown: reach a target with three numbers, each used at most once.

`python examples/countdown/countdown.py FOLDER` writes the rows; `reward` judges the responses.
"""

import ast
import itertools
import json
import operator
import random
import sys
from collections import Counter, defaultdict
from fractions import Fraction
from pathlib import Path

OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
LARGEST_NUMBER = 9
LARGEST_TARGET = 50
HELD_OUT = 256


def evaluate(expression):
    """Return the value of an expression and the numbers in it; ValueError if it is not valid."""
    numbers = []

    def value(node):
        match node:
            case ast.Constant(value=number) if type(number) is int:
                numbers.append(number)
                return Fraction(number)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
                return OPERATORS[type(op)](value(left), value(right))
        raise ValueError("only whole numbers, + - * / and parentheses are allowed")

    try:
        return value(ast.parse(expression.strip(), mode="eval").body), numbers
    except (SyntaxError, ZeroDivisionError, RecursionError, MemoryError) as error:
        raise ValueError(str(error)) from None


def reward(row, answer_key, response):
    """Score 1 for an expression that reaches the target, 0.1 for any other valid expression."""
    try:
        value, used = evaluate(response)
    except ValueError:
        return {"score": 0.0, "acc": False, "valid": 0.0}
    if Counter(used) - Counter(row["numbers"]):  # a number that is not there, or used twice
        return {"score": 0.0, "acc": False, "valid": 0.0}
    right = value == row["target"]
    score = 1.0 if right else 0.1
    return {"score": score, "acc": right, "valid": 1.0, "numbers_used": len(used)}


def solutions(numbers):
    """Return the targets that can be reached, each with its expressions."""
    found = defaultdict(list)
    for a, b, c in sorted(set(itertools.permutations(numbers))):
        expressions = [f"{a}{p}{b}" for p in "+-*/"]
        expressions += [f"{a}{p}{b}{q}{c}" for p in "+-*/" for q in "+-*/"]
        expressions += [f"({a}{p}{b}){q}{c}" for p in "+-" for q in "*/"]
        for expression in expressions:
            value, _ = evaluate(expression)
            if value.denominator == 1 and 1 <= value <= LARGEST_TARGET:
                found[int(value)].append(expression)
    return found


def rows(seed=1):
    """Return training rows and held-out rows, which share no problem in any order of its numbers."""
    draw = random.Random(seed)
    problems = []
    digits = range(1, LARGEST_NUMBER + 1)
    for numbers in itertools.combinations_with_replacement(digits, 3):
        for target, expressions in solutions(numbers).items():
            orders = sorted(set(itertools.permutations(numbers)))
            problems.append(
                [
                    {
                        "prompt": f"{target} from {' '.join(map(str, order))}",
                        "answer": draw.choice(expressions),
                        "numbers": order,
                        "target": target,
                    }
                    for order in orders
                ]
            )
    draw.shuffle(problems)
    test = [draw.choice(problem) for problem in problems[:HELD_OUT]]
    train = [row for problem in problems[HELD_OUT:] for row in problem]
    return train, test


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, written in zip(("train", "test"), rows(), strict=True):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in written))
