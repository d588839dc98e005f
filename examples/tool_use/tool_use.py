"""Orders: the total of one or two items, whose prices only a tool can read.

`python examples/tool_use/tool_use.py FOLDER` writes the rows; `Orders` is the environment.
"""

import json
import random
import sys
from pathlib import Path

from megatron_rl import Answer, Environment, Step

ITEMS = ("tea", "rice", "milk", "salt", "eggs", "bread", "beans", "honey")
LARGEST_PRICE = 20
ORDERS = 8_000
HELD_OUT = 256
LOOKED_UP = 0.4  # of the orders of the warm start; the others are answered with a guess


class Orders(Environment):
    """An order, the tool `price`, and a reward of 1 for the right total."""

    def __init__(self):
        self.tools = (self.price,)
        self.calls = 0

    def reset(self, row):
        self.prices = row["prices"]
        self.total = row["answer"]
        return [{"role": "user", "content": row["prompt"]}]

    def price(self, item: str) -> int:
        """Return the price of one item of the order."""
        self.calls += 1
        if item not in self.prices:
            raise ValueError(f"there is no {item!r}")  # the policy reads this as the tool's result
        return self.prices[item]

    def step(self, answer: Answer):
        right = answer.content.strip() == self.total
        return Step(done=True, reward=float(right), numbers={"looked_up": self.calls})


def orders(seed=1):
    """Return rows with an order, its total, and a price list of its own."""
    draw = random.Random(seed)
    rows = []
    for number in draw.sample(range(1000, 10_000), ORDERS + HELD_OUT):
        items = draw.sample(ITEMS, draw.randint(1, 2))
        prices = {item: draw.randint(1, LARGEST_PRICE) for item in ITEMS}
        rows.append(
            {
                "prompt": f"Order {number}: {' and '.join(items)}",
                "answer": str(sum(prices[item] for item in items)),
                "items": items,
                "prices": prices,
            }
        )
    return rows


def looked_up(row):
    """Return the row's conversation in warm-start rows: a prompt and its response for each turn."""
    messages = [{"role": "user", "content": row["prompt"]}]
    turns = []
    for item in row["items"]:
        call = f'[price(item="{item}")]'
        turns.append({"prompt": list(messages), "answer": call})
        messages.append({"role": "assistant", "content": call})
        messages.append({"role": "tool", "content": str(row["prices"][item])})
    return [*turns, {"prompt": messages, "answer": row["answer"]}]


def warm_start(rows, seed=2):
    """Return turns to imitate: some orders are looked up, the totals of the others are guessed."""
    draw = random.Random(seed)
    turns = []
    for row in rows:
        if draw.random() < LOOKED_UP:
            turns += looked_up(row)
        else:
            guess = sum(draw.randint(1, LARGEST_PRICE) for _ in row["items"])
            turns.append({"prompt": row["prompt"], "answer": str(guess)})
    draw.shuffle(turns)
    return turns


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    rows = orders()
    files = {
        "test": rows[:HELD_OUT],
        "train": rows[HELD_OUT:],
        "warm": warm_start(rows[HELD_OUT:]),
        "read": [looked_up(row)[-1] for row in rows[:HELD_OUT]],  # all prices are known already
    }
    for name, written in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in written))
