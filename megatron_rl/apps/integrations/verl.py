"""Adapter for verl's tools (BaseTool) as a run's environment: created, executed and released for
each tool call.

With `instance: conversation` one instance of each tool lives as long as the conversation, and
`calc_reward` of all is its reward. Rewards that `execute` returns are the number `tool_reward`;
`rewarded: true` adds them to the reward.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron_rl.environments.environment import Answer, Step
from megatron_rl.rewards.functions import for_metrics, imported


class VerlEnvironment:
    """A conversation with verl's tools, given as in a tool_config_path (class_name, config)."""

    def __init__(
        self, tools: Sequence[Mapping[str, Any]], instance: str = "call", rewarded: bool = False
    ) -> None:
        if instance not in ("call", "conversation"):
            raise ValueError(f"instance is call or conversation, not {instance!r}")
        self._lasting = instance == "conversation"
        self._rewarded = rewarded
        self._tools = {tool.name: tool for tool in map(_made, tools)}
        self._instances: dict[str, str] = {}
        self._kwargs: Mapping[str, Any] = {}
        self._rewards = list[float]()
        self._numbers = dict[str, float]()
        self.tools = [self._tool(name) for name in self._tools]

    async def reset(self, row: Mapping[str, Any]) -> Any:
        extra = row.get("extra_info") or {}
        self._kwargs = row.get("tools_kwargs") or extra.get("tools_kwargs") or {}
        if self._lasting:
            self._instances = {name: await self._created(name) for name in self._tools}
        return row["prompt"]

    def step(self, answer: Answer) -> Step:
        return Step(done=True, numbers=self._numbers | {"tool_reward": sum(self._rewards)})

    async def close(self) -> float | None:
        """The reward of the tools: none, unless it is theirs."""
        found = self._rewards if self._rewarded else []
        for name, instance in self._instances.items():
            found = [*found, float(await self._tools[name].calc_reward(instance))]
            await self._tools[name].release(instance)
        self._instances = {}
        return sum(found) if found else None

    async def _created(self, name: str) -> str:
        kwargs = (self._kwargs.get(name) or {}).get("create_kwargs") or {}
        instance, _ = await self._tools[name].create(create_kwargs=kwargs)
        return instance

    def _tool(self, name: str) -> Callable[..., Any]:
        tool = self._tools[name]

        async def called(**arguments: Any) -> str:
            instance = self._instances.get(name) or await self._created(name)
            try:
                response, reward, metrics = await tool.execute(instance, arguments)
            finally:
                if name not in self._instances:
                    await tool.release(instance)
            self._rewards.append(float(reward or 0.0))
            self._numbers |= for_metrics(metrics)
            if getattr(response, "image", None) or getattr(response, "video", None):
                raise ValueError(f"{name} has answered with images: text alone is taken")
            return (response if isinstance(response, str) else response.text) or ""

        called.__name__ = name
        called.schema = tool.get_openai_tool_schema().model_dump(  # type: ignore[attr-defined]
            exclude_unset=True, exclude_none=True
        )
        return called


def _made(entry: Mapping[str, Any]) -> Any:
    where, _, name = str(entry["class_name"]).replace(":", ".").rpartition(".")
    schema = entry.get("tool_schema")
    if schema is not None:
        schema = imported("verl.tools.schemas:OpenAIFunctionToolSchema").model_validate(schema)
    return imported(f"{where}:{name}")(config=dict(entry.get("config") or {}), tool_schema=schema)
