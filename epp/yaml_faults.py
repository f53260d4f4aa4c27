"""What is wrong with a YAML file that does not fit its struct, in one line for the person who wrote it.

Pure text work over msgspec's errors. Called by the readers of the configuration, the policy and the endpoints file, which put
the file's name before it.
"""

from __future__ import annotations

import difflib
import re
from typing import Final

import msgspec
from msgspec import inspect

_UNKNOWN: Final = re.compile(
    r"^Object contains unknown field `(?P<name>.*?)`(?: - at `\$(?P<path>.*)`)?$", re.DOTALL
)
_MARK: Final = re.compile(r'\s*in "<(?:byte|unicode) string>", line (\d+), column (\d+):?')
_STEP: Final = re.compile(r"\.(?P<field>\w+)|\[[^\]]*\]")
_NOTHING: Final = "Expected `object`, got `null`"


def in_words(error: Exception, *, of: type[msgspec.Struct]) -> str:
    """One line: the field at fault, what is wrong with it and, where that is a misspelt name, what was probably meant."""
    text = str(error)
    if unknown := _UNKNOWN.match(text):
        return _unknown_field(unknown["name"], path=unknown["path"] or "", of=of)
    if text == _NOTHING:
        return f"is empty; it needs at least {_join(_fields(inspect.type_info(of), required=True))}"
    if _MARK.search(text):
        placed = _MARK.sub(r" (line \1, column \2),", text)
        return f"not YAML: {' '.join(placed.split()).rstrip(',')}"
    return text


def _unknown_field(name: str, *, path: str, of: type[msgspec.Struct]) -> str:
    known = _fields(_at(inspect.type_info(of), path))
    meant = difflib.get_close_matches(name, known, n=1)
    where = f" - at `${path}`" if path else ""
    return f"unknown field `{name}`{where}; {f'did you mean `{meant[0]}`?' if meant else f'fields are {_join(known)}'}"


def _at(node: inspect.Type, path: str) -> inspect.Type:
    """The type that stands where `path` leads, of those that a struct's fields, lists and maps hold."""
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
    """What `X | None` is besides None, and an annotated type without its annotations."""
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
