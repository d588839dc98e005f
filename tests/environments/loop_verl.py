"""verl's side of loops.py, in a process that imports nothing of this project: its ToolAgentLoop,
with its own defaults.

The answers stand in for LLMServerClient, which would ask its servers for them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from loop_parts import TOOLS, each, played


class Scripted:
    """In LLMServerClient's place."""

    def __init__(self, conversation: dict[str, Any]) -> None:
        self.turns = iter(zip(conversation["answers"], conversation["logprobs"], strict=True))

    async def generate(self, request_id: str, **asked: Any) -> Any:
        from verl.workers.rollout.replica import TokenOutput

        token_ids, logprobs = next(self.turns)
        return TokenOutput(token_ids=token_ids, log_probs=logprobs, stop_reason="completed")


def configured(script: dict[str, Any]) -> Any:
    import verl
    from hydra import compose, initialize_config_dir

    with initialize_config_dir(
        str(Path(verl.__file__).parent / "trainer" / "config"), version_base=None
    ):
        config = compose("ppo_trainer")
    rollout = config.actor_rollout_ref.rollout
    rollout.prompt_length = rollout.response_length = script["most_tokens"]
    rollout.multi_turn.format = "hermes"
    rollout.multi_turn.max_parallel_calls = script["most_calls"]
    rollout.multi_turn.max_assistant_turns = script["turns"]
    config.data.apply_chat_template_kwargs = script["options"]
    return config


def play(script: dict[str, Any]) -> list[dict[str, Any]]:
    from transformers import AutoTokenizer
    from verl.experimental.agent_loop.agent_loop import DictConfigWrap, ToolListWrap
    from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
    from verl.tools.function_tool import FUNCTION_TOOL_REGISTRY, function_tool
    from verl.utils.dataset.rl_dataset import RLHFDataset

    config = configured(script)
    tokenizer = AutoTokenizer.from_pretrained(script["folder"])
    if not FUNCTION_TOOL_REGISTRY:
        for tool in TOOLS:
            function_tool(tool.__name__, schema=tool.schema)(tool)
    tools = ToolListWrap(list(FUNCTION_TOOL_REGISTRY.values()))

    def one(_: int, conversation: dict[str, Any]) -> Any:
        wrapped = DictConfigWrap(config)
        data = DictConfigWrap(config.data)
        loop = ToolAgentLoop(
            wrapped,
            Scripted(conversation),
            tokenizer,
            None,
            RLHFDataset,
            data,
            script["model_type"],
            tools=tools,
        )
        return loop.run({}, raw_prompt=conversation["prompt"])

    return each(script, one, "prompt_ids response_ids response_mask response_logprobs")


if __name__ == "__main__":
    played(play)
