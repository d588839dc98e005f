"""Checks of a model's chat template: whether turns append or fork, the parser of its tool calls."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.config import ConfigError
from megatron_rl.config.bounds import AUTO
from megatron_rl.config.foreign import fields_of
from megatron_rl.config.schema import EnvironmentSection
from megatron_rl.data.tokenizer import FolderTokenizer, has_template
from megatron_rl.environments.conversation import Conversation
from megatron_rl.types import NOTHING

# markers of tool calls in a template, and vLLM's parser of each; the first match wins
WRITES = (
    ("[TOOL_CALLS]", "mistral"),
    ("functools[", "phi4_mini_json"),
    ("<|tool_call|>", "phi4_mini_json"),
    ("<function=", "qwen3_coder"),
    ("<tool_call>", "hermes"),
    ("<|python_tag|>", "llama3_json"),
    ('"parameters":', "llama3_json"),
)


def parser_of(section: EnvironmentSection, tokenizer: FolderTokenizer) -> str:
    """Return the parser that the recipe names or the template implies; ConfigError if neither
    does.
    """
    if section.tool_parser != AUTO:
        known = fields_of("vllm", ("tool_parsers/__init__.py",), ("_TOOL_PARSERS_TO_REGISTER",))
        if known and section.tool_parser not in known:
            raise ConfigError(
                f"environment.tool_parser: {section.tool_parser}: vLLM has {', '.join(sorted(known))}"
            )
        return section.tool_parser
    template = tokenizer.template()
    found = next((parser for mark, parser in WRITES if mark in template), None)
    if found is None:
        raise ConfigError(
            "environment.tool_parser: auto, but the chat template does not show how tool calls "
            "are written; name one of vLLM's parsers, such as hermes"
        )
    return found


@dataclass(frozen=True)
class Behaviour:
    """Treatment by the template of a turn that already has a response."""

    # after a tool message: the earlier response is unchanged; None: not tested
    appends_tool: bool | None
    appends_user: bool | None  # after the next user message; None: the template refuses it
    thinking_stays: bool | None = None  # the same for a response with thinking

    def describe(self) -> str:
        words = {
            True: "appends",
            False: "changes the response before: the conversation forks",
            None: "is not taken",
        }
        said = [f"a user's message {words[self.appends_user]}"]
        if self.appends_tool is not None:
            said.insert(0, f"a tool's result {words[self.appends_tool]}")
        if self.thinking_stays is False and self.appends_user:
            said.append("thinking of turns before is left out: there it forks")
        forks = False in (self.appends_user, self.appends_tool, self.thinking_stays)
        return "; ".join(said) + (
            " (environment.history=append keeps what was said)" if forks else ""
        )


def problems(
    section: EnvironmentSection,
    folder: Path,
    options: Mapping[str, Any],
    tools: Sequence[Any],
    agent: bool,
) -> Iterator[str]:
    """Return the reasons why the model in this folder cannot be used with this environment."""
    if not has_template(folder):
        yield f"environment.name: {folder} has no chat template, which says how turns follow each other; add one"
        return
    tokenizer = FolderTokenizer(folder)
    try:
        if tools or agent:
            parser_of(section, tokenizer)
        seen = behaviour(tokenizer, options, tools)
    except ConfigError as error:
        yield str(error)
        return
    if seen.appends_user is None and seen.appends_tool is None:
        yield (
            f"environment.name: the chat template of {folder} takes neither a second turn nor a "
            "tool's result; name another model"
        )


def describe(section: EnvironmentSection, folder: Path, options: Mapping[str, Any]) -> str:
    """Describe for the dry run how conversations grow."""
    if section.history == "append":
        return "each turn continues the exact tokens before it (environment.history: append)"
    tool = {
        "type": "function",
        "function": {
            "name": "add",
            "description": "",
            "parameters": {"type": "object", "properties": {}},
        },
    }
    return f"by the model's chat template {behaviour(FolderTokenizer(folder), options, [tool]).describe()}"


QUESTION = {"role": "user", "content": "What is 12 + 30?"}
ANSWER = {"role": "assistant", "content": "It is 42."}
THOUGHT = {"role": "assistant", "content": "<think>\nTwelve and thirty.\n</think>\n\nIt is 42."}
CALL: dict[str, Any] = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "call00000", "type": "function", "function": {"name": "add", "arguments": {"a": 12}}}
    ],
}
RESULT = {"role": "tool", "name": "add", "tool_call_id": "call00000", "content": "42"}


def behaviour(
    tokenizer: FolderTokenizer, options: Mapping[str, Any], tools: Sequence[Any]
) -> Behaviour:
    """Test the template on conversations of two turns."""

    def appends(answer: Mapping[str, Any], more: Mapping[str, Any]) -> bool | None:
        conversation = Conversation(tokenizer, options)
        try:
            first = conversation.request([QUESTION], tools)
            conversation.answered(first, NOTHING, answer)
            return conversation.request([QUESTION, answer, more], tools).parent is first
        except Exception:  # exceptions of jinja
            return None

    return Behaviour(
        appends(CALL, RESULT) if tools else None,
        appends(ANSWER, QUESTION),
        appends(THOUGHT, QUESTION),
    )
