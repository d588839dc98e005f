"""A scripted policy in place of a sampler: records the sessions' requests and their times."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import compress
from pathlib import Path
from typing import Any

from environments.chats import APPENDS, completion, folder_of

from megatron_rl.config.schema import Credit, DataSection, EnvironmentSection, RolloutSection
from megatron_rl.data.tokenizer import FolderTokenizer
from megatron_rl.environments.sessions import Sessions
from megatron_rl.types import Prompt, Rollout, SamplingParams, ToolCall, ToolFormat

HERE = "environments.hostile"
CALL = re.compile(r"<tool_call>(.*?)</tool_call>")


class ScriptedPolicy:
    """Says `says(text of the request, seed)`; ends it with a stop."""

    def __init__(self, tokenizer: FolderTokenizer, says: Callable[[str, int], str]) -> None:
        self.tokenizer = tokenizer
        self.says = says
        self.asked: list[tuple[list[int], int, str]] = []  # tokens, most tokens, key
        self.open = self.most = 0
        self.version = self.policy_version = 0
        self.pause_s = 0.0
        self.pauses: list[float] = []  # of the next requests, in their order
        self.together = 0  # no response before this many requests are open at once
        self.backwards = 0  # so many requests are answered last first

    def turns(self, params: SamplingParams, *, patient: bool) -> ScriptedPolicy:
        return self

    async def ask(
        self,
        tokens: Sequence[int],
        *,
        max_tokens: int,
        seed: int,
        key: str,
        tools: ToolFormat | None = None,
    ) -> Rollout:
        self.asked.append((list(tokens), max_tokens, key))
        self.open += 1
        self.most = max(self.most, self.open)
        while self.most < self.together:
            await asyncio.sleep(0.01)
        await asyncio.sleep(self.pauses.pop(0) if self.pauses else self.pause_s)
        place = self.open
        while self.backwards and (len(self.asked) < self.backwards or self.open > place):
            await asyncio.sleep(0.01)
        self.open -= 1
        text = self.says(self.tokenizer.decode_all(tokens), seed)
        ids = [*self.tokenizer.encode(text), self.tokenizer.stop_token_ids[0]]
        cut = ids[:max_tokens]
        text = text if cut == ids else self.tokenizer.decode_all(cut)
        made = completion(
            cut,
            [self.version],
            finish_reason="stop" if len(cut) == len(ids) else "length",
            format="int8",
        )
        if tools is None:
            return made
        calls = [
            ToolCall(one["name"], json.dumps(one["arguments"]))
            for one in map(json.loads, CALL.findall(text))
        ]
        content = text.partition("<tool_call>")[0] if calls else text
        return replace(made, content=content, calls=calls)

    def close(self) -> None:
        pass


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


class Played:
    """Sessions of an environment of `hostile` with a scripted policy."""

    def __init__(
        self,
        folder: Path,
        says: Callable[[str, int], str],
        name: str = f"{HERE}:Guess",
        **settings: Any,
    ) -> None:
        self.tokenizer = FolderTokenizer(folder_of(folder, settings.pop("template", APPENDS)))
        self.policy = ScriptedPolicy(self.tokenizer, says)
        context = settings.pop("context", 4096)
        response = settings.pop("response", 256)
        system = settings.pop("system", None)
        given = {
            "tool_parser": "hermes",
            "tool_timeout_s": 60.0,
            "credit": Credit.outcome,
        } | settings
        self.section = EnvironmentSection(name=name, **given)
        rollout = RolloutSection(max_response_tokens=response, max_context_tokens=context)
        data = DataSection(system_prompt=system)
        self.sessions = Sessions(self.section, rollout, data, self.tokenizer, self.policy, 60.0)  # type: ignore[arg-type]
        self.params = SamplingParams(samples=1, max_tokens=response)

    def __enter__(self) -> Played:
        self.sessions.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.sessions.close()

    def play(self, *rows: dict[str, Any], samples: int = 1) -> list[list[Rollout]]:
        """The sessions of each row, one group each."""
        prompts = [
            Prompt(
                number,
                (1, 2),
                "",
                {"prompt": "What is 12 + 30?", "answer": "42", **row},
            )
            for number, row in enumerate(rows or ({},))
        ]
        params = SamplingParams(samples=samples, max_tokens=self.params.max_tokens)
        rollouts = self.sessions.generate(prompts, params, seed=1)
        return [[one for one in rollouts if one.group == number] for number in range(len(prompts))]

    def sampled(self, rollout: Rollout) -> str:
        """Text of the tokens that are trained on."""
        return self.tokenizer.decode_all(list(compress(rollout.token_ids, rollout.loss_mask)))

    def text(self, rollout: Rollout) -> str:
        return self.tokenizer.decode_all([*rollout.prompt.token_ids, *rollout.token_ids])
