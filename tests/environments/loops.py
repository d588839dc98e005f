"""The same conversations in this project's loop and in others': tokens, masks and logprobs of each,
side by side.

`PYTHONPATH=tests python -m environments.loops FOLDER COUNT --verl PYTHON --skyrl PYTHON`: the
published templates in FOLDER, COUNT conversations of each kind, and an interpreter that has the
other project. Answers are drawn once, as ids.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import subprocess
import tempfile
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from environments.chats import Published, folder_of, published

from megatron_rl.config.schema import DataSection, EnvironmentSection, RolloutSection
from megatron_rl.data.tokenizer import FolderTokenizer
from megatron_rl.engine.tool_calls import ToolCallParser
from megatron_rl.environments.sessions import Sessions
from megatron_rl.sampler.client.interface import Completion, WrittenCall
from megatron_rl.types import Prompt, Rollout, SamplingParams, ToolFormat

HERE = Path(__file__).parent
TURNS = 6
MOST_CALLS = 16
MOST_TOKENS = 4096
MODELS = {
    "qwen2.5": "qwen2",
    "qwen3": "qwen3",
    "llama": "llama",
    "mistral": "mistral",
    "ministral": "mistral",
}
Draw = random.Random
Answer = tuple[str, bool]  # its text, and whether it is ended by a stop


def call(draw: Draw, name: str = "say", arguments: Any = None) -> str:
    given = {"text": draw.choice(["42", "", "é 日本", "a\nb"])} if arguments is None else arguments
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': given}, indent=draw.choice([None, 1]))}\n</tool_call>"


def calling(draw: Draw, made: Callable[[Draw], str]) -> list[Answer]:
    return [(made(draw), True) for _ in range(draw.randrange(1, 4))]


UNREAD = '<tool_call>\n{"name": "say", "arguments": {\n</tool_call>'
WITH_TOOLS: dict[str, Callable[[Draw], list[Answer]]] = {
    "one call": lambda draw: calling(draw, call),
    "words before a call": lambda draw: calling(draw, lambda one: "So it is.\n" + call(one)),
    "thinking before a call": lambda draw: calling(
        draw, lambda one: "<think>\nso\n</think>\n\n" + call(one)
    ),
    "several calls": lambda draw: calling(draw, lambda one: call(one) + "\n" + call(one)),
    "calls until the last turn": lambda draw: [(call(draw), True)] * TURNS,
    "a cut answer": lambda draw: [(call(draw), True), ("It is", False)],
    "a cut answer with a whole call": lambda draw: [(call(draw), False)],
    "a tool that fails": lambda draw: calling(draw, lambda one: call(one, "fail")),
    "an unknown tool": lambda draw: calling(draw, lambda one: call(one, "nobody")),
    "arguments that are no mapping": lambda draw: calling(
        draw, lambda one: call(one, arguments=[1])
    ),
    "a call that cannot be read": lambda draw: [(UNREAD, True)],
    "one of two calls cannot be read": lambda draw: [(call(draw) + "\n" + UNREAD, True)],
    "a long result": lambda draw: [(call(draw, arguments={"text": "it is so " * 200}), True)],
}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def said(draw: Draw) -> list[dict[str, str]]:
    return [user(draw.choice(["No. Again.", "é", " 42\n", "a\nb"]))]


# what the environment says after each answer, and which answers are cut
WITHOUT_TOOLS: dict[str, Callable[[Draw], tuple[list[list[dict[str, str]]], list[Answer]]]] = {
    "answers": lambda draw: ([said(draw) for _ in range(draw.randrange(4))], []),
    "thinking": lambda draw: (
        [said(draw)],
        [("<think>\nso\n</think>\n\n42", True), ("<think>\nno\n</think>\n\n43", True)],
    ),
    "two messages": lambda draw: ([said(draw) + said(draw)], []),
    "a tool's message": lambda draw: ([[{"role": "tool", "content": "42"}]], []),
    "no message": lambda draw: ([[]], []),
    "a cut last answer": lambda draw: ([], [("It is", False)]),
    "a cut answer": lambda draw: ([said(draw)], [("It is", False)]),
}


def drawn(draw: Draw, tokenizer: FolderTokenizer, answer: Answer) -> list[int]:
    """Tokens of an answer, some of its words as nobody would tokenize them."""
    text, stopped = answer
    ids = list[int]()
    for piece in text.split(" "):
        word = (" " if ids else "") + piece
        pieces = [word] if draw.random() < 0.6 else list(word)
        ids += [one for each in pieces for one in tokenizer.encode(each)]
    return ids + list(tokenizer.stop_token_ids[:1] if stopped else ())


def conversations(tokenizer: FolderTokenizer, count: int, tools: bool) -> Iterator[dict[str, Any]]:
    for kind in WITH_TOOLS if tools else WITHOUT_TOOLS:
        for seed in range(count):
            draw = Draw(f"{kind} {seed}")
            lines, answers = ([], WITH_TOOLS[kind](draw)) if tools else WITHOUT_TOOLS[kind](draw)
            answers = [*answers, *[("So it is 42", True)] * TURNS]
            ids = [drawn(draw, tokenizer, one) for one in answers]
            prompt = [{"role": "system", "content": "Think."}] * (draw.random() < 0.4) + [
                user("What is 12 + 30?")
            ]
            logprobs = [[-draw.randrange(1, 64) / 32 for _ in one] for one in ids]
            yield {
                "kind": kind,
                "prompt": prompt,
                "said": lines,
                "answers": ids,
                "logprobs": logprobs,
            }


class Scripted:
    """In a sampler's place; the group is the conversation's number."""

    policy_version = 0

    def __init__(self, script: Mapping[str, Any], tokenizer: FolderTokenizer) -> None:
        self.turns_of = [
            iter(zip(one["answers"], one["logprobs"], strict=True))
            for one in script["conversations"]
        ]
        self.tokenizer = tokenizer
        self.parser = ToolCallParser(script["folder"])
        if script["tools"]:
            # vLLM is imported before sessions wait for it
            self.parser.parsed([], [], "hermes", "[]")
            # what cannot be read is among the answers
            logging.getLogger("vllm").setLevel(logging.CRITICAL)

    def turns(self, params: SamplingParams, *, patient: bool) -> Scripted:
        return self

    async def ask(
        self,
        tokens: Sequence[int],
        *,
        max_tokens: int,
        seed: int,
        key: str,
        tools: ToolFormat | None = None,
    ) -> tuple[Completion, str]:
        ids, logprobs = next(self.turns_of[int(key)])
        stops = self.tokenizer.stop_token_ids
        ended = "stop" if ids[-1] in stops else "length"
        about: dict[str, Any] = {}
        if tools is not None:
            about = self.parser.parsed(list(ids), list(stops), tools.parser, tools.schemas)
            about["calls"] = [WrittenCall(**one) for one in about["calls"]]
        return Completion(
            array("i", ids), array("f", logprobs), ended, [(0, len(ids))], **about
        ), ""

    def close(self) -> None: ...


def play(script: Mapping[str, Any], history: str) -> list[list[dict[str, Any]]]:
    """The rows of each conversation, as this project's sessions make them."""
    tokenizer = FolderTokenizer(Path(script["folder"]))
    parts = HERE / "loop_parts.py"
    name = f"{parts}:Tools"
    settings = {}
    if not script["tools"]:
        name = "megatron_rl.workshop.adapters.skyrl:Environment"
        settings = {"target": f"{parts}:Lines"}
    section = EnvironmentSection(
        name=name, settings=settings, turns=TURNS, history=history, tool_parser="hermes", sessions=2
    )
    rollout = RolloutSection(max_response_tokens=MOST_TOKENS, max_context_tokens=MOST_TOKENS)
    data = DataSection(template=script["options"])
    sessions = Sessions(section, rollout, data, tokenizer, Scripted(script, tokenizer), 60.0)  # type: ignore[arg-type]
    sessions.start()
    try:
        rows = [{"prompt": one["prompt"], "said": one["said"]} for one in script["conversations"]]
        prompts = [Prompt(number, (1,), "", row) for number, row in enumerate(rows)]
        params = SamplingParams(samples=1, max_tokens=MOST_TOKENS)
        rollouts = sessions.generate(prompts, params, seed=1, first_group=0, step=0)
    finally:
        sessions.close()
    made: list[list[dict[str, Any]]] = [[] for _ in rows]
    for one in rollouts:
        made[one.group].append(row_of(one))
    return made


def row_of(one: Rollout) -> dict[str, Any]:
    row = {
        "prompt": one.prompt.token_ids,
        "tokens": one.token_ids,
        "mask": one.loss_mask,
        "logprobs": one.logprobs,
    }
    error = one.session.error if one.session else None
    return {"error": error} if error else {name: list(values) for name, values in row.items()}


def difference(
    tokenizer: FolderTokenizer, ours: Sequence[Mapping[str, Any]], theirs: Mapping[str, Any]
) -> str | None:
    """How one conversation differs; None: its prompt, tokens, mask and logprobs are the same."""
    for side, row in (("here", ours[0]), ("there", theirs)):
        if "error" in row:
            return f"{side}: {row['error']}"
    if len(ours) > 1:
        return f"here: {len(ours)} rows"
    for name in ("prompt", "tokens", "mask", "logprobs"):
        here = list(ours[0][name])
        there = list(theirs[name])
        if here == there:
            continue
        apart = (at for at, (a, b) in enumerate(zip(here, there, strict=False)) if a != b)
        place = next(apart, min(len(here), len(there)))
        if name not in ("prompt", "tokens"):
            return f"{name} at {place}: here {here[place : place + 8]}, there {there[place : place + 8]}"
        trained = [
            [one for one, kept in zip(row["tokens"], row["mask"], strict=True) if kept]
            for row in (ours[0], theirs)
        ]
        same = "the answers are the same, " * (trained[0] == trained[1])
        shown = [tokenizer.decode_all(one[max(0, place - 8) : place + 24]) for one in (here, there)]
        return f"{same}{name} at {place} of {len(here)} and {len(there)}: here {shown[0]!r}, there {shown[1]!r}"
    return None


@dataclass
class Peer:
    name: str
    python: str
    tools: bool

    def play(self, scripts: Sequence[Mapping[str, Any]], place: Path) -> list[list[dict[str, Any]]]:
        asked = place / "scripts.json"
        result = place / "result.json"
        asked.write_text(json.dumps(scripts))
        subprocess.run(
            [self.python, str(HERE / f"loop_{self.name}.py"), str(asked), str(result)], check=True
        )
        return json.loads(result.read_text())


def scripted(one: Published, case: str, folder: Path, tools: bool, count: int) -> dict[str, Any]:
    return {
        "name": f"{one.name} {case}".strip(),
        "folder": str(folder),
        "options": dict(one.cases[case]),
        "stops": list(one.stops),
        "tools": tools,
        "turns": TURNS,
        "most_calls": MOST_CALLS,
        "most_tokens": MOST_TOKENS,
        "model_type": next(
            (model for name, model in MODELS.items() if name in one.name), "default"
        ),
        "conversations": list(conversations(FolderTokenizer(folder), count, tools)),
    }


def compared(
    script: Mapping[str, Any], theirs: Sequence[Mapping[str, Any]], history: str
) -> Iterator[str]:
    """A line for each kind of conversation: how many are the same, and how the first of the others
    differs.
    """
    tokenizer = FolderTokenizer(Path(script["folder"]))
    found: dict[str, list[str | None]] = {}
    for talk, here, there in zip(
        script["conversations"], play(script, history), theirs, strict=True
    ):
        found.setdefault(talk["kind"], []).append(difference(tokenizer, here, there))
    for kind, differs in found.items():
        first = next((text for text in differs if text is not None), "")
        yield f"{kind}: {differs.count(None)} of {len(differs)} equal{'; ' * bool(first)}{first}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("count", type=int)
    parser.add_argument("--template", default="", help="part of the names of those to try")
    parser.add_argument("--verl", help="an interpreter that has verl")
    parser.add_argument("--skyrl", help="an interpreter that has skyrl and skyrl-gym")
    asked = parser.parse_args()
    found = {one: one.read(asked.folder) for one in published() if asked.template in one.name}
    for peer in (Peer("verl", asked.verl, True), Peer("skyrl", asked.skyrl, False)):
        with tempfile.TemporaryDirectory() as place:
            scripts = []
            for one, template in found.items():
                if peer.python and template and (one.tools or not peer.tools):
                    folder = folder_of(Path(place) / one.name, template, one.special, one.stops)
                    scripts += [
                        scripted(one, case, folder, peer.tools, asked.count) for case in one.cases
                    ]
            for script, theirs in zip(
                scripts, peer.play(scripts, Path(place)) if scripts else (), strict=True
            ):
                for history in ("template", "append"):
                    print(f"\n{peer.name}, {script['name']}, history={history}")
                    for line in compared(script, theirs, history):
                        print(f"  {line}", flush=True)


if __name__ == "__main__":
    main()
