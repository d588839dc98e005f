"""Taskset of verifiers 0.4: a sum, with a tool that adds."""

from collections.abc import Iterable

import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: str


class Adder(vf.Toolset[vf.ToolsetConfig, vf.State]):
    TOOL_PREFIX = None

    @vf.tool
    def add(self, a: int, b: int) -> str:
        """Add two numbers."""
        return f"It is {a + b}."


class SumTask(vf.Task[SumData]):
    @classmethod
    def toolsets(cls, config: vf.TaskConfig) -> list[vf.Toolset]:
        return [Adder(vf.ToolsetConfig())]

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)


class SumTaskset(vf.Taskset[SumTask]):
    def load(self) -> Iterable[SumTask]:
        yield SumTask(SumData(prompt="Add 12 and 30.", answer="42"), self.config.task)


__all__ = ["SumTaskset"]

if __name__ == "__main__":
    Adder.run()  # the process of its tools
