"""Renders conversations and makes tokens of texts as vLLM does, by tokenizer.json and the chat template in a
model's folder.

This is the only module of the picker that knows `tokenizers` and `jinja2`, which come with an extra.
Templates are rendered in jinja's sandbox with the functions and filters that Hugging Face's transformers
gives them. Options of the server that change the rendering (another template on its command line, arguments
for it) are settings. Caller: `service`.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NoReturn

from jinja2 import Environment, nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Encoding, Tokenizer

from epp.base.errors import ConfigError, usable
from epp.request.jsontext import check_cost
from epp.sources.kvevents.mapping import Tokens, UnmappedError

_MOST_TOKENS: Final = 2**18
"""Most tokens of a text. Freeing the tokenizer's results for so many takes 14 ms, during which nothing else
runs."""
_PIECE_CHARS: Final = 2**14
"""Length of the pieces in which tokens are counted. A normalizer can make 18 characters of one character, and
each can become a token."""


class FolderLanguage:
    """Implements `mapping.Language`."""

    def __init__(
        self, folder: Path, *, template: Path | None = None, arguments: Mapping[str, Any] | None = None
    ) -> None:
        """Raises ConfigError if something in the folder is missing or cannot be read."""
        try:
            with usable():
                vocabulary = (folder / "tokenizer.json").read_text()
                config = _read_json(folder / "tokenizer_config.json")
                text = template.read_text() if template is not None else _template(folder, config)
        except ValueError as error:
            raise ConfigError(f"{folder}: {error}") from error
        try:
            self._tokenizer = Tokenizer.from_str(vocabulary)
        except Exception as error:
            # the tokenizers package raises no more specific error for a file that it cannot use
            raise ConfigError(f"{folder}/tokenizer.json: {error}") from error
        self._special = _special_tokens(config)
        self._arguments = dict(arguments or {})
        self._render: Callable[..., str] | None = None
        self._lists = False
        """Whether the template loops over a content's parts, so that it needs a list."""
        if text:
            environment = _environment()
            try:
                self._render = environment.from_string(text).render
                loops = environment.parse(text).find_all(nodes.For)
                self._lists = any(_is_content(loop.iter) for loop in loops)
            except (TemplateError, RecursionError) as error:
                raise ConfigError(f"{template or folder}: chat template: {error}") from error

    def tokens(self, text: str, *, special: bool) -> Tokens:
        self._check_size(text)
        encoded = self._encoded(text, special=special)
        ends, latest = [], 0
        # Places are read one by one. Making a list of all places is one step, which holds the interpreter for
        # 150 ms if there are a million tokens.
        for token in range(len(encoded)):
            place = encoded.token_to_chars(token)
            if place is not None:  # a token without a place stands for no text
                latest = max(latest, place[1])
            ends.append(latest)
        return Tokens(encoded.ids, ends)

    def _check_size(self, text: str) -> None:
        """Raises UnmappedError for a text of too many tokens. If the text can be cut into pieces, their
        tokens are counted first.
        """
        if len(text) <= _PIECE_CHARS or (text.isascii() and len(text) <= _MOST_TOKENS):
            return
        tokens = 0
        for start in range(0, len(text), _PIECE_CHARS):
            tokens += len(self._encoded(text[start : start + _PIECE_CHARS], special=False))
            if tokens > _MOST_TOKENS:
                raise UnmappedError("content")

    def _encoded(self, text: str, *, special: bool) -> Encoding:
        # This is a batch of one text, since only batches release the interpreter. Otherwise picks would wait
        # for a whole long prompt.
        try:
            return self._tokenizer.encode_batch([text], add_special_tokens=special)[0]
        except BaseException as error:
            if isinstance(error, Exception) or type(error).__name__ == "PanicException":
                raise UnmappedError("template") from error
            raise

    def render(self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Any] | None) -> str:
        if self._render is None:
            raise UnmappedError("template")
        try:
            return self._render(
                {
                    "documents": None,
                    **self._special,
                    **self._arguments,
                    "messages": [self._message(message) for message in messages],
                    "tools": [_tool(tool) for tool in tools] if tools else None,
                    "add_generation_prompt": True,
                }
            )
        except Exception as error:
            # A client's text runs through the program of a template.
            # Every error, even a recursion that is too deep, means that the template refuses the text.
            raise UnmappedError("template") from error

    def _message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        content = message["content"]
        parts = [content] if isinstance(content, str) else content
        shown: Any = [{"type": "text", "text": part} for part in parts] if self._lists else "\n".join(parts)
        calls = message.get("tool_calls")
        return {
            **message,
            "content": shown,
            **({"tool_calls": [_call(call) for call in calls]} if calls else {}),
        }


def _tool(tool: Any) -> Any:
    """Return the tool with its fields in the order of vLLM, in which templates write them."""
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict):
        return tool
    known = {name: function.get(name) for name in ("name", "description", "parameters")}
    if function.get("strict") is not None:
        known["strict"] = function["strict"]
    return {"type": tool.get("type", "function"), "function": known}


def _call(call: Any) -> Any:
    """Return the call with its arguments as an object. Clients send them as JSON in a string."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    check_cost(function["arguments"].encode())
    arguments = json.loads(function["arguments"]) if function["arguments"] else {}
    return {**call, "function": {**function, "arguments": arguments}}


def _read_json(path: Path) -> Mapping[str, Any]:
    """Return the content of a JSON file. Empty: there is no such file. Raises ValueError."""
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path.name}: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path.name} is not a JSON object")  # noqa: TRY004 - of a file's content
    return value


def _template(folder: Path, config: Mapping[str, Any]) -> str:
    """Return the template in the folder's own file, else in the tokenizer's configuration. If there are
    several: the default one.
    """
    file = folder / "chat_template.jinja"
    if file.exists():
        return file.read_text()
    chosen = config.get("chat_template") or ""
    if isinstance(chosen, list):
        named = [one for one in chosen if isinstance(one, dict) and one.get("name") == "default"]
        chosen = named[0].get("template") if named else ""
    if not isinstance(chosen, str):
        raise ValueError("tokenizer_config.json: chat_template is not text")  # noqa: TRY004 - of a file's content
    return chosen


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    found = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token"):
        token = config.get(name)
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str):
            found[name] = token
    return found


def _environment() -> Environment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = lambda value, ensure_ascii=False, **form: json.dumps(
        value, ensure_ascii=ensure_ascii, **form
    )
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)  # noqa: DTZ005 - servers use their local time too
    return environment


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _is_content(node: nodes.Node) -> bool:
    """Return whether an expression of a template is the content of a message."""
    match node:
        case nodes.Filter(node=inner) if inner is not None:
            return _is_content(inner)
        case nodes.Getattr(attr="content") | nodes.Name(name="content"):
            return True
        case nodes.Getitem(arg=nodes.Const(value="content")):
            return True
        case _:
            return False
