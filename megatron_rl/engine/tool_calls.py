"""Parser of the tool calls in a response's tokens: decodes them, and runs the named tool-call
parser of vLLM.
"""

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from megatron_rl.data.tokenizer import without_stops
from megatron_rl.processes.channel import Refused
from megatron_rl.types import ToolCall


class ToolCallParser:
    """Tool-call parser of a model folder, whose tokenizer is loaded at its first use."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._tokenizer: Any = None
        self._parser = lru_cache(4)(self._made)

    def check(self, parser: str, schemas: str) -> None:
        """Refuse a request with an invalid parser: its response would fail in the middle of a
        step.
        """
        try:
            self._parser(parser, schemas)
        except Exception as error:
            raise Refused(
                f"tool_parser {parser!r}, or its tools: {type(error).__name__}: {error}"[:500]
            ) from None

    def parsed(
        self, token_ids: list[int], stop_token_ids: list[int], parser: str, schemas: str
    ) -> dict[str, Any]:
        """Return the text outside the calls, and each call's name and arguments as JSON text.

        Text without a valid call is content.
        """
        tool_parser, request = self._parser(parser, schemas)
        text = self._tokenizer.decode(
            without_stops(token_ids, stop_token_ids), skip_special_tokens=False
        )
        try:
            found = tool_parser.extract_tool_calls(text, request)
            calls = [
                ToolCall(one.function.name, one.function.arguments) for one in found.tool_calls
            ]
            content = found.content
            # unpaired surrogates cannot be encoded
            "".join([content or "", *(one.name + one.arguments for one in calls)]).encode()
        except Exception:  # any exception: the parser reads a model's output
            calls = []
            content = text
        if content is None:
            content = "" if calls else text
        return {"content": content, "calls": calls}

    def _made(self, parser: str, schemas: str) -> tuple[Any, Any]:
        from transformers import AutoTokenizer
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.tool_parsers import ToolParserManager

        if self._tokenizer is None:
            if not Path(self._folder, "tokenizer.json").exists():
                raise RuntimeError(
                    f"tool calls cannot be read: {self._folder} has no tokenizer.json"
                )
            self._tokenizer = AutoTokenizer.from_pretrained(self._folder, local_files_only=True)
        asked: dict[str, Any] = {
            "messages": [{"role": "user", "content": ""}],
            "model": "",
            "tools": json.loads(schemas) or None,
        }
        request = ChatCompletionRequest(**asked)
        tools: Any = request.tools
        return ToolParserManager.get_tool_parser(parser)(self._tokenizer, tools), request
