"""Decodes YAML files into structs. If a file does not fit, the error says in one line what is wrong, for the
person who wrote the file.

The readers of the configuration, the policy and the endpoints file call this module, and put the name of the
file before this line.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from types import UnionType
from typing import Any, Final

import msgspec
import yaml
from msgspec import inspect

_UNKNOWN: Final = re.compile(
    r"^Object contains unknown field `(?P<name>.*?)`(?: - at `\$(?P<path>.*)`)?$", re.DOTALL
)
_MARK: Final = re.compile(r'\s*in "<(?:byte|unicode) string>", line (\d+), column (\d+):?')
_STEP: Final = re.compile(r"\.(?P<field>\w+)|\[[^\]]*\]")
_NOTHING: Final = "Expected `object`, got `null`"
_AT: Final = re.compile(r" - at `\$(?P<path>.*)`$")
_WRITE: Final = (
    (
        re.compile(r"Expected `(int|float)\b.*, got `str`"),
        "write a number, without quotes and without a unit",
    ),
    (re.compile(r"Expected `bool\b.*, got `str`"), "write true or false, without quotes"),
    (re.compile(r"Expected `str\b.*, got `(int|float|bool)`"), "put the value in quotes"),
    (re.compile(r"Expected `array\b.*, got "), "write a list, such as [a, b]"),
)
"""The advice for a value of another type."""
_REMOVED: Final = {
    "runningRequestTokens": "a request in flight no longer has a price of its own",
    "maxChunks": "exact mode follows 100,000 chunks",
    "maxQueuedPrompts": "1,000 prompts may wait for exact mode",
    "maxQueuedBytes": "64 MiB of prompts may wait for exact mode",
    "assumedModes": "full duplex is assumed; let the data plane send its `protocol_config`",
    "tiers": "a prefix counts the same in every tier of a server",
    "peers": "the live page shows the requests of its own picker",
    "maxTextBytes": "the text of answers is not read",
    "recording": "run `epp record FILE` beside the picker, which asks the admin address",
    "headroomSeconds": "a request goes when its server will begin with it within 0.3 s",
    "whenLate": "a late request gets 429; to refuse none, write no deadline, and `order: Shortest`",
    "status": "every replica writes statuses, without a Lease, live numbers and Events; use the metrics",
}
"""Fields of earlier releases, and what replaces each."""
_MOST_DEPTH: Final = 64
_MOST_ALIASES: Final = 1_000


def decode(
    text: str | bytes,
    *,
    kind: type | UnionType,
    prepare: Callable[[dict[Any, Any]], Any] = lambda found: found,
) -> Any:
    """Return the document as `kind`. Any text that does not fit raises a ValueError and nothing else.

    `prepare` may change the mapping that the text holds: it gives older and shorter forms their full form.
    """
    try:
        _check_shape(text)
        found = msgspec.yaml.decode(text)
        return msgspec.convert(prepare(found) if isinstance(found, dict) else found, kind)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    except (LookupError, AttributeError, TypeError, ArithmeticError) as error:
        # PyYAML makes values of explicit tags (`!!bool x`) without looking at them first.
        raise ValueError(f"a value does not fit its tag: {type(error).__name__}: {error}") from error


def _check_shape(text: str | bytes) -> None:
    """Refuse documents on which PyYAML would overflow its stack or use memory without bound: deep nesting,
    and aliases inside a value that has an anchor. Refuse a key that stands twice, too: PyYAML would drop the
    first value without an error.
    """
    anchored: list[bool] = []
    keys: list[_Keys | None] = []
    aliases = 0
    for event in yaml.parse(text, Loader=yaml.CSafeLoader):
        if isinstance(event, yaml.NodeEvent) and keys and keys[-1] is not None:
            keys[-1].see(event)
        if isinstance(event, yaml.CollectionStartEvent):
            anchored.append(event.anchor is not None or (bool(anchored) and anchored[-1]))
            keys.append(_Keys() if isinstance(event, yaml.MappingStartEvent) else None)
            if len(anchored) > _MOST_DEPTH:
                raise ValueError("nested too deeply")
        elif isinstance(event, yaml.CollectionEndEvent):
            anchored.pop()
            keys.pop()
        elif isinstance(event, yaml.AliasEvent):
            aliases += 1
            if aliases > _MOST_ALIASES or (anchored and anchored[-1]):
                raise ValueError("too many aliases, or one within a value that has an anchor itself")


class _Keys:
    """The keys of one mapping, as its nodes come: a key, its value, the next key."""

    def __init__(self) -> None:
        self._lines: dict[str, int] = {}
        self._key_is_next = True

    def see(self, node: yaml.NodeEvent) -> None:
        is_key, self._key_is_next = self._key_is_next, not self._key_is_next
        if not is_key or not isinstance(node, yaml.ScalarEvent) or node.value == "<<":
            return
        line = node.start_mark.line + 1 if node.start_mark else 0
        if node.value in self._lines:
            raise ValueError(
                f"`{node.value}` stands twice, in lines {self._lines[node.value]} and {line}; write it once"
            )
        self._lines[node.value] = line


def in_words(error: Exception, *, of: type[msgspec.Struct]) -> str:
    """Return one line that names the field at fault and what is wrong with it. For a misspelt name it also
    says which name was probably meant.
    """
    text = str(error)
    if unknown := _UNKNOWN.match(text):
        return _unknown_field(unknown["name"], path=unknown["path"] or "", of=of)
    if text == _NOTHING:
        return f"is empty; it needs at least {_join(_fields(inspect.type_info(of), required=True))}"
    if _MARK.search(text):
        placed = _MARK.sub(r" (line \1, column \2),", text)
        return f"not YAML: {' '.join(placed.split()).rstrip(',')}"
    return text + _instead(text, of=of)


def _instead(text: str, *, of: type[msgspec.Struct]) -> str:
    """Return the values that the field takes, if this value has another type or is none of the field's
    choices.
    """
    found = _AT.search(text)
    node = _at(inspect.type_info(of), found["path"]) if found else None
    if isinstance(node, inspect.LiteralType):
        return f"; values are {_join([str(value) for value in node.values if value])}"
    return next((f"; {words}" for pattern, words in _WRITE if pattern.match(text)), "")


def _unknown_field(name: str, *, path: str, of: type[msgspec.Struct]) -> str:
    if name in _REMOVED:
        return f"`{name}` was removed{f' - at `${path}`' if path else ''}; delete it: {_REMOVED[name]}"
    known = _fields(_at(inspect.type_info(of), path))
    meant = difflib.get_close_matches(name, known, n=1)
    where = f" - at `${path}`" if path else ""
    return f"unknown field `{name}`{where}; {f'did you mean `{meant[0]}`?' if meant else f'fields are {_join(known)}'}"


def _at(node: inspect.Type, path: str) -> inspect.Type:
    """Return the type at `path`, followed through the fields, lists and maps of structs."""
    for step in _STEP.finditer(path):
        node = _struct_or_collection(node)
        match node:
            case inspect.StructType(fields=fields):
                node = next((each.type for each in fields if each.encode_name == step["field"]), node)
            case inspect.DictType(value_type=inner) | inspect.VarTupleType(item_type=inner):
                node = inner
            case _:
                break
    return _struct_or_collection(node)


def _struct_or_collection(node: inspect.Type) -> inspect.Type:
    """Remove annotations, and None from `X | None`."""
    while isinstance(node, inspect.Metadata):
        node = node.type
    if isinstance(node, inspect.UnionType):
        return next((each for each in node.types if not isinstance(each, inspect.NoneType)), node)
    return node


def _fields(node: inspect.Type, *, required: bool = False) -> list[str]:
    if not isinstance(node, inspect.StructType):
        return []
    return [each.encode_name for each in node.fields if each.required or not required]


def _join(names: list[str]) -> str:
    return ", ".join(names)
