"""Reads the fields that ask for an answer of a form: `response_format`, `structured_outputs`, and a
`tool_choice` that forces a call. A forced call is a JSON text with the tool's name and parameters, which
`call_in` takes apart. Callers: the request reader, the replies.
"""

import re
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import msgspec

from model_server.server.errors import ApiError
from model_server.server.prompts import decoded, option
from model_server.text.language import Alternative

Calls = Literal["", "named", "required"]
_OBJECT: dict[str, Any] = {"type": "object"}
_TOOL_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


@dataclass(frozen=True, slots=True)
class Form:
    param: str
    """The field that asks for the form."""
    alternatives: tuple[Alternative, ...]
    calls: Calls = ""
    """Says which tools the answer may call. Empty means that the answer is a text."""


class _Schema(msgspec.Struct):
    schema: dict[str, Any]


class _Text(msgspec.Struct, tag="text", tag_field="type"):
    pass


class _AnyObject(msgspec.Struct, tag="json_object", tag_field="type"):
    pass


class _OfSchema(msgspec.Struct, tag="json_schema", tag_field="type"):
    json_schema: _Schema


class _Function(msgspec.Struct):
    name: str
    parameters: dict[str, Any] | None = None


class _Tool(msgspec.Struct):
    """A tool, or the choice of a tool: with a function inside as in chat, or flat as in `/v1/responses`."""

    function: _Function | None = None
    name: str = ""
    parameters: dict[str, Any] | None = None

    def plain(self) -> _Function:
        return self.function or _Function(self.name, self.parameters)


class _Call(msgspec.Struct):
    name: str
    parameters: msgspec.Raw


class Body(Protocol):
    response_format: msgspec.Raw
    structured_outputs: msgspec.Raw


def form_of(body: Body) -> Form | None:
    """Return the form that the answer must have. None means any text."""
    kinds = _Text | _AnyObject | _OfSchema
    asked: Any = option(body.response_format, kinds, param="response_format")
    outputs: dict[str, Any] = (
        option(body.structured_outputs, dict[str, Any], param="structured_outputs") or {}
    )
    found = []
    if isinstance(asked, _AnyObject | _OfSchema):
        schema = asked.json_schema.schema if isinstance(asked, _OfSchema) else _OBJECT
        found.append(Form("response_format", (Alternative(schema),)))
    for name, value in outputs.items():
        if value in (None, False):
            continue
        if name not in ("json", "json_object"):
            text = f"structured_outputs.{name[:50]} is not supported by this server; give a schema as json."
            raise ApiError(text, param="structured_outputs")
        schema = value if name == "json" else _OBJECT
        if isinstance(schema, str):
            schema = decoded(schema.encode(), dict[str, Any], param="structured_outputs")
        found.append(Form("structured_outputs", (Alternative(schema),)))
    if len(found) > 1:
        raise ApiError("Give one form of the answer, not several.", param="structured_outputs")
    return found[0] if found else None


def forced_call(choice: msgspec.Raw, tools: msgspec.Raw) -> Form | None:
    """Return the form of the call that `tool_choice` forces. None means that no call is forced."""
    wanted: str | _Tool | None = option(choice, str | _Tool, param="tool_choice")
    if wanted in (None, "none", "auto"):
        return None
    calls: Calls = "named" if isinstance(wanted, _Tool) else "required"
    listed: list[_Tool] = option(tools, list[_Tool], param="tools") or []
    named = [each for each in (tool.plain() for tool in listed) if _TOOL_NAME.fullmatch(each.name)]
    if isinstance(wanted, _Tool):
        named = [each for each in named if each.name == wanted.plain().name]
    elif wanted != "required":
        named = []
    if not named:
        raise ApiError("tool_choice must be none, auto, required or one of the tools.", param="tool_choice")
    forms = [
        Alternative(each.parameters or _OBJECT, f'{{"name": "{each.name}", "parameters": ', "}")
        for each in named
    ]
    return Form("tools", tuple(forms), calls)


def call_in(text: str) -> tuple[str, str] | None:
    """Return the name and the arguments of a forced call. Return None if the answer was cut short, or its
    arguments are nested so deep that nobody can decode them.
    """
    try:
        call = msgspec.json.decode(text, type=_Call)
        msgspec.json.decode(call.parameters)
    except (msgspec.DecodeError, RecursionError):
        return None
    return call.name, bytes(call.parameters).decode()
