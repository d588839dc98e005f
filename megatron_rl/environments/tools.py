"""Tools of an environment: JSON schemas of typed functions; validates and binds a model's
arguments.

A function with an attribute `schema`, in OpenAI's format, uses that one and validates its arguments
itself. worker.py calls the tools.
"""

import inspect
import json
from collections.abc import Mapping
from functools import partial
from typing import Any, get_type_hints

import pydantic

from megatron_rl.environments.environment import Tool


class ToolBox:
    """Tools of one environment, by name."""

    def __init__(self, tools: Any) -> None:
        self._tools = {getattr(tool, "__name__", type(tool).__name__): tool for tool in tools or ()}
        self._own = {
            name: tool.schema for name, tool in self._tools.items() if hasattr(tool, "schema")
        }
        self._forms = {
            name: _form(name, tool) for name, tool in self._tools.items() if name not in self._own
        }

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """Return the schemas in the form of chat templates and OpenAI's API."""
        return [self._own[name] if name in self._own else self._shown(name) for name in self._tools]

    def _shown(self, name: str) -> dict[str, Any]:
        function = {
            "name": name,
            "description": inspect.getdoc(self._tools[name]) or "",
            "parameters": _plain(self._forms[name].model_json_schema()),
        }
        return {"type": "function", "function": function}

    def bound(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """Return the call with bound arguments; ValueError describes the model's mistake."""
        if name in self._own:
            return partial(self._tools[name], **arguments)
        form = self._forms.get(name)
        if form is None:
            raise ValueError(
                f"there is no tool {name[:100]!r}; there are: {', '.join(self._tools) or 'none'}"
            )
        try:
            given = form.model_validate(dict(arguments))
        except pydantic.ValidationError as error:
            wrong = "; ".join(
                f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()[:3]
            )
            raise ValueError(f"{name}: {wrong}"[:500]) from None
        return partial(
            self._tools[name], **{key: getattr(given, key) for key in type(given).model_fields}
        )


def _form(name: str, tool: Tool) -> type[pydantic.BaseModel]:
    try:
        hints = get_type_hints(tool, include_extras=True)
    except (NameError, TypeError):
        hints = {}
    fields: dict[str, Any] = {}
    for parameter in inspect.signature(tool).parameters.values():
        if parameter.kind in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
            parameter.POSITIONAL_ONLY,
        ):
            raise TypeError(
                f"tool {name}: parameter {parameter} cannot be passed by name; name each one"
            )
        if parameter.default is parameter.empty:
            default = ...
        else:
            default = parameter.default
        fields[parameter.name] = (hints.get(parameter.name, Any), default)
    return pydantic.create_model(name, __config__=pydantic.ConfigDict(extra="forbid"), **fields)


def _plain(schema: Any) -> Any:
    """Remove the titles that pydantic adds to every name."""
    if isinstance(schema, list):
        return [_plain(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: _plain(value)
        for key, value in schema.items()
        if not (key == "title" and isinstance(value, str))
    }


def as_text(result: Any) -> str:
    """Return a tool's result as text for the policy."""
    if isinstance(result, str):
        return result
    return json.dumps(result, default=str, ensure_ascii=False)
