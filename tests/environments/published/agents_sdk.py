"""OpenAI Agents SDK: an agent with a tool. `python agents_sdk.py chat|responses [stream]`."""

import asyncio
import sys

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI


@function_tool
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return f"It is {a + b}."


async def main() -> None:
    set_tracing_disabled(True)
    kind = OpenAIResponsesModel if sys.argv[1] == "responses" else OpenAIChatCompletionsModel
    model = kind("policy", AsyncOpenAI(max_retries=0))
    agent = Agent(name="adder", instructions="Use the tool.", tools=[add], model=model)
    if "stream" in sys.argv:
        result = Runner.run_streamed(agent, "Add 12 and 30.")
        async for _ in result.stream_events():
            pass
    else:
        result = await Runner.run(agent, "Add 12 and 30.")
    print(result.final_output)


asyncio.run(main())
