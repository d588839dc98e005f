"""LangGraph: its agent with a tool. `python langgraph_agent.py chat|responses [stream]`."""

import sys

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent


@tool
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return f"It is {a + b}."


def main() -> None:
    streaming = "stream" in sys.argv
    model = ChatOpenAI(
        model="policy", use_responses_api=sys.argv[1] == "responses", streaming=streaming
    )
    agent = create_react_agent(model, [add])
    given = {"messages": [{"role": "user", "content": "Add 12 and 30."}]}
    if streaming:
        *_, state = agent.stream(given, stream_mode="values")
    else:
        state = agent.invoke(given)
    print(state["messages"][-1].text)


main()
