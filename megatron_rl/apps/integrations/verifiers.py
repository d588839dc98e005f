"""Environments of PyPI's verifiers as an agent: they send requests to a run's gateway as to an
OpenAI endpoint.

With `python`, an interpreter that has verifiers where this project's has not, that interpreter
plays them in a process of its own, which runs this file without the rest of the project.
"""

import asyncio
import json
import os
import sys
from asyncio.subprocess import PIPE
from collections.abc import Mapping
from contextlib import redirect_stdout
from functools import cache
from importlib.util import find_spec
from typing import Any

MODEL = "policy"
# not `python FILE`: that would put this folder, and this file, before the package of its name
PROGRAM = "import runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__')"
LARGEST = 16 << 20


class Agent:
    """Plays the environment `name`, loaded with `arguments`: its task number `index` of each row.

    Below verifiers 0.4, a row without `index` is the task itself, as in verifiers' data sets
    (prompt, answer, info). From 0.4 on, `name` is the taskset, and `arguments` its environment's
    configuration.
    """

    def __init__(
        self, name: str, arguments: Mapping[str, Any] | None = None, python: str | None = None
    ) -> None:
        self._about = {"name": name, "arguments": dict(arguments or {})}
        self._python = python
        self._process: asyncio.subprocess.Process | None = None

    async def run(self, base_url: str, row: Mapping[str, Any]) -> dict[str, float]:
        key = os.environ.get("OPENAI_API_KEY", "")
        asked = {**self._about, "base_url": base_url, "row": dict(row), "key": key}
        if self._python is None:
            return await play(asked)
        if self._process is None:
            self._process = await asyncio.create_subprocess_exec(
                self._python, "-c", PROGRAM, __file__, stdin=PIPE, stdout=PIPE, limit=LARGEST
            )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(asked, default=str).encode() + b"\n")
        await self._process.stdin.drain()
        line = await self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._python} has ended, with {await self._process.wait()}")
        found = json.loads(line)
        if "error" in found:
            raise RuntimeError(found["error"])
        return found


async def play(asked: Mapping[str, Any]) -> dict[str, float]:
    """Return the reward of one rollout, and its metrics."""
    os.environ["OPENAI_API_KEY"] = asked["key"]
    if _has_tasksets():
        return await _episode(asked)
    from verifiers.types import ClientConfig

    environment = _loaded(asked["name"], json.dumps(asked["arguments"]))
    row = asked["row"]
    if "index" in row:
        task = environment.get_dataset()[int(row["index"])]
    else:
        task = {"example_id": 0, **row}
    client = ClientConfig(
        client_type="openai_chat_completions",
        api_base_url=asked["base_url"],
        api_key_var="OPENAI_API_KEY",
    )
    output = await environment.run_rollout(task, client=client, model=MODEL, sampling_args={})
    if output.get("error"):
        raise RuntimeError(f"{asked['name']}: {output['error']}")
    return {**(output["metrics"] or {}), "reward": float(output["reward"])}


async def _episode(asked: Mapping[str, Any]) -> dict[str, float]:
    """Play a task of verifiers 0.4; return its reward and metrics."""
    from verifiers import v1
    from verifiers.v1.utils.loaders import load_environment, resolve_env_config

    settings = {**asked["arguments"]}
    settings["taskset"] = {**settings.get("taskset", {}), "id": asked["name"]}
    environment = load_environment(resolve_env_config(settings))
    (task,) = environment.taskset.include(idx=[int(asked["row"]["index"])])
    client = v1.EvalClientConfig(base_url=asked["base_url"], api_key_var="OPENAI_API_KEY")
    async with environment.serving():
        episode = await environment.run_episode(task, v1.ModelContext(MODEL, client))
    if not episode.ok:
        errors = [one.message for part in (episode, *episode.traces) for one in part.errors]
        raise RuntimeError(f"{asked['name']}: {errors}")
    (trace,) = episode.traces
    return {**trace.metrics, "reward": float(trace.reward)}


def _has_tasksets() -> bool:
    """Return True from verifiers 0.4 on."""
    try:
        return find_spec("verifiers.v1.env") is not None
    except ModuleNotFoundError:  # no verifiers.v1
        return False


@cache
def _loaded(name: str, arguments: str) -> Any:
    import verifiers

    return verifiers.load_environment(name, **json.loads(arguments))


def _serve() -> None:
    """In the other interpreter: a request in each line, a reply in each."""
    loop = asyncio.new_event_loop()
    replies = sys.stdout
    with redirect_stdout(sys.stderr):
        for line in sys.stdin:
            try:
                found: Mapping[str, Any] = loop.run_until_complete(play(json.loads(line)))
            except (Exception, SystemExit) as error:
                found = {"error": f"{type(error).__name__}: {error}"[:500]}
            replies.write(json.dumps(found, default=float) + "\n")
            replies.flush()


if __name__ == "__main__":
    _serve()
