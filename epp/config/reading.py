"""Reads the files of the configuration, and decodes YAML into structs (`Strict` is the base of each section).
If a file does not fit, the error says in one line what is wrong, for the person who wrote the file.

The readers of the configuration, the policy and the endpoints file call this module, and put the name of the
file before this line.
"""

import difflib
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Final, TypeVar

import msgspec
import yaml
from msgspec import Meta, inspect

from epp.base.errors import ConfigError, usable

Ratio = Annotated[float, Meta(ge=0, le=1)]


class Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """A frozen struct with fields in camelCase. An unknown field is refused. The text below a field describes
    it.
    """


_FAULT: Final = re.compile(r"(?P<what>.*?)(?: - at `(?P<key>key` in `)?\$\.?(?P<path>.*)`)?", re.DOTALL)
_UNKNOWN: Final = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_MARK: Final = re.compile(r'\s*in "<(?:byte|unicode) string>", line (\d+), column (\d+):?')
_STEP: Final = re.compile(r"\.?(?P<field>\w+)|\[(?P<index>\d*)[^\]]*\]")
_FIRST: Final = re.compile(r"(?P<path>[A-Za-z][\w.\[\]]*): ")
_TYPES: Final = re.compile(r"`([a-z]+(?: \| [a-z]+)*)`")
_WORDS: Final = {
    "object": "a mapping",
    "array": "a list",
    "str": "a text",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "null": "nothing",
}
"""The words for the types of msgspec."""
_NOTHING: Final = "Expected `object`, got `null`"
_WRITE: Final = (
    (
        re.compile(r"Expected `(int|float)\b.*, got `str`"),
        "write a number, without quotes and without a unit",
    ),
    (re.compile(r"Expected `bool\b.*, got `str`"), "write true or false, without quotes"),
    (re.compile(r"Expected `str\b.*, got `(int|float|bool)`"), "put it in quotes"),
)
"""The advice for a value of another type."""
_PATTERN: Final = re.compile(r" matching regex '\^\(*(.*)'")
_FORMS: Final = {
    "[a-z0-9]": "lower-case letters and digits, with dashes or dots between them",
    "[a-z0-9": "lower-case letters, digits and dashes",
    "[A-Za-z0-9]([-A-Za-z0-9.]": "HOST:PORT",
    "[A-Za-z0-9": "letters and digits, with dashes or dots between them",
    "/": "a path, such as /metrics",
    "0|": 'a whole number from -9999 to 9999 in quotes, such as "-10"',
    "tcp|": "tcp://HOST:PORT",
    ":[1-9]": ":PORT, /PATH or both",
}
"""What to write, by the beginning of a field's pattern."""
_NOT_YAML: Final = {
    "cannot start any token": "indent with spaces, not tabs, and put text that begins with a sign in quotes",
    "mapping values": "indent the fields of one mapping equally, and put text that holds `: ` in quotes",
    "another document": "remove the line `---`",
    "quoted scalar": "close the quotation mark",
    "flow": "close the bracket, and put a comma between values",
}
"""What to write, by a part of what PyYAML says."""
_REMOVED: Final = {
    "runningRequestTokens": "a request in flight no longer has a price of its own",
    "maxChunks": "exact mode follows 100,000 chunks",
    "maxQueuedPrompts": "1,000 prompts may wait for exact mode",
    "maxQueuedBytes": "64 MiB of prompts may wait for exact mode",
    "assumedModes": "full duplex is assumed; let the data plane send its `protocol_config`",
    "tiers": "a prefix counts the same in every tier of a server",
    "snapshotIntervalSeconds": "a picker that joins reads the last 10,000 batches",
    "peers": "the live page shows the requests of its own picker",
    "maxTextBytes": "the text of answers is not read",
    "recording": "run `epp record FILE` beside the picker, which asks the admin address",
    "http2Cleartext": "the gateway speaks HTTP/1.1, and HTTP/2 by prior knowledge",
    "hashAlgorithm": "the events of the servers show the algorithm",
    "table.ttlSeconds": "servers forget by room alone, and so does the table",
    "learnCapacity": "a cache has the size that its server states, or else `defaultCapacityTokens`",
    "headroomSeconds": "a request goes when its server will begin with it within 0.6 s",
    "whenLate": "a late request gets 429; to refuse none, write no deadline, and `order: Shortest`",
    "costMetadata": "no gateway reads the estimates; decisions and recordings have them",
    "perPriority": "`inAll` and `perTenant` bound what waits; the lowest priority is refused first",
    "maxPageBytes": "a page may have 4 MiB",
    "keepDecisions": "the last 1,000 decisions are kept",
    "socketMode": "restrict access by the permissions of the directory",
    "flow.paths": "give a priority by `objectives` or `models`",
    "addressFamily": "pods are reached at their primary address",
    "holdStreams": "streams are held unless `dialect` or `envoy.failOpen: false` says that the gateway fails closed",
    "kubernetes.status": "every replica writes statuses, without a Lease, live numbers and Events; use the metrics",
}
"""Fields of earlier releases, and what replaces each. `a.b` is a `b` that counts only within `a`."""
_MOST_DEPTH: Final = 64
_MOST_VALUES: Final = 100_000
"""A text with more characters may have a value for each of them."""
_MOST_SHOWN_CHARS: Final = 80


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
        _refuse_depth(text)
        loader = yaml.CSafeLoader(text)
        node = loader.get_single_node()
        _refuse_twins(node, most=max(_MOST_VALUES, len(text)))
        found = loader.construct_document(node) if node is not None else None
        return msgspec.convert(prepare(found) if isinstance(found, dict) else found, kind)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    except (LookupError, AttributeError, TypeError, ArithmeticError) as error:
        # PyYAML makes values of explicit tags (`!!bool x`) without looking at them first.
        raise ValueError(f"a value does not fit its tag: {type(error).__name__}: {error}") from error


def _refuse_depth(text: str | bytes) -> None:
    """Refuse nesting on which PyYAML would overflow its stack."""
    depth = 0
    for event in yaml.parse(text, Loader=yaml.CSafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _MOST_DEPTH:
            raise ValueError("nested too deeply")


def _refuse_twins(root: yaml.Node | None, *, most: int) -> None:
    """Refuse a key that stands twice, since PyYAML would drop the first value without an error. Refuse
    aliases that make very many values of a short text, too.
    """
    waiting, left = [root], most
    while waiting and (left := left - 1):
        node = waiting.pop()
        if isinstance(node, yaml.SequenceNode):
            waiting += node.value
        elif isinstance(node, yaml.MappingNode):
            lines: dict[str, int] = {}
            for key, value in node.value:
                waiting.append(value)
                if not isinstance(key, yaml.ScalarNode) or key.value == "<<":
                    continue
                line = key.start_mark.line + 1
                if key.value in lines:
                    first = lines[key.value]
                    where = f"lines {first} and {line}" if first < line else f"line {line}"
                    raise ValueError(f"`{key.value}` stands twice, in {where}; write it once")
                lines[key.value] = line
    if waiting:
        raise ValueError("too many values")


def in_words(error: Exception, *, of: type[msgspec.Struct], text: str | bytes = b"", under: str = "") -> str:
    """Return one line: where the fault is, what was found there, and what to write. `text` is the file, for
    the number of the line. `under` stands before each place.
    """
    words = str(error)
    if words == _NOTHING:
        return f"is empty; it needs at least {', '.join(_fields(inspect.type_info(of), required=True))}"
    if mark := _MARK.search(words):
        what = _MARK.sub(r", line \1,", _MARK.sub(",", words, count=1))
        what = " ".join(what.split()).replace(",,", ",").rstrip(",")
        advice = next((f"; {write}" for part, write in _NOT_YAML.items() if part in what), "")
        return f"line {mark[1]}, column {mark[2]}: not YAML: {what}{advice}"
    if isinstance(error, ConfigError) and (first := _FIRST.match(words)):
        return _placed(words[first.end() :], first["path"], text=text, under=under)
    fault = _FAULT.fullmatch(words)
    what, path = (fault["what"], fault["path"] or "") if fault else (words, "")
    if fault and fault["key"]:
        what, got, kind = what.partition(", got ")
        what = f"{what} as each name{got}{kind}"
    node = _at(inspect.type_info(of), path)
    if unknown := _UNKNOWN.fullmatch(what):
        advice = _unknown_field(unknown[1], path=path, node=node)
        return _placed(advice, path, text=text, under=under, field=unknown[1])
    return _placed(_plain(what) + _instead(what, node), path, text=text, under=under)


def _placed(words: str, path: str, *, text: str | bytes, under: str, field: str = "") -> str:
    line, value = _found_at(text, f"{path}.{field}" if field else path)
    if words.startswith("expected") and value:
        shown = f", found {value[:_MOST_SHOWN_CHARS]}"
        what, end, advice = words.partition("; ")
        what = what.replace(", found a number", shown) if "found" in what else what + shown
        words = what + end + advice
    places = (f"line {line}" if line else "", ".".join(filter(None, (under, path))), words)
    return ": ".join(filter(None, places))


def _found_at(text: str | bytes, path: str) -> tuple[int, str]:
    """Return the line of the last field of `path` that the text has, and its value if it is a plain one."""
    try:
        node = yaml.compose(text, Loader=yaml.CSafeLoader) if text and path else None
    except (yaml.YAMLError, ValueError, RecursionError):
        return 0, ""
    line = 0
    for step in _STEP.finditer(path):
        inner = node.value if isinstance(node, yaml.CollectionNode) else []
        if step["index"]:
            found = [(each, each) for each in inner[int(step["index"]) :][:1]]
        else:
            found = [pair for pair in inner if isinstance(pair, tuple) and pair[0].value == step["field"]]
        if not found:
            return line, ""
        key, node = found[0]
        line = key.start_mark.line + 1
    return line, node.value if isinstance(node, yaml.ScalarNode) else ""


def _plain(words: str) -> str:
    """Return what msgspec says, in the words of a person who writes YAML."""

    def named(types: re.Match[str]) -> str:
        kinds = [kind for kind in types[1].split(" | ") if kind != "null"] or ["null"]
        return " or ".join(_WORDS[kind] for kind in kinds) if set(kinds) <= _WORDS.keys() else types[0]

    words = _TYPES.sub(named, _PATTERN.sub(" of another form", words))
    words = words.replace("Expected ", "expected ").replace(", got ", ", found ")
    return words.replace("Object missing required field", "there is no").replace(
        "Invalid enum value", "found"
    )


def _instead(words: str, node: inspect.Type) -> str:
    """Return what the field takes, if this value has another type or is none of the field's choices."""
    if isinstance(node, inspect.LiteralType):
        return f"; values are {', '.join(str(value) for value in node.values if value)}"
    if words.startswith("Object missing"):
        needed = _fields(node, required=True)
        return f"; it needs {', '.join(needed)}" if len(needed) > 1 else ""
    if words.startswith("Expected `array"):
        entry = _fields(_struct_or_collection(getattr(node, "item_type", node)), required=True)
        shown = "- {" + ": ..., ".join(entry) + ": ...}" if entry else "[a, b]"
        return f"; write a list, such as {shown}"
    if words.startswith("Expected `object"):
        dash = ", without a dash before them" if "got `array`" in words else ""
        return f"; write its fields{dash}: {', '.join(_fields(node)) or 'NAME: VALUE'}"
    if shape := _PATTERN.search(words):
        return next((f"; write {form}" for start, form in _FORMS.items() if shape[1].startswith(start)), "")
    return next((f"; {advice}" for pattern, advice in _WRITE if pattern.match(words)), "")


def _unknown_field(name: str, *, path: str, node: inspect.Type) -> str:
    instead = _REMOVED.get(name) or _REMOVED.get(f"{path.rpartition('.')[2]}.{name}")
    if instead is not None:
        return f"`{name}` was removed; delete it: {instead}"
    known = _fields(node)
    within = {
        each: section.encode_name
        for section in (node.fields if isinstance(node, inspect.StructType) else ())
        for each in _fields(_struct_or_collection(section.type))
    }
    if name in within:
        return f"unknown field `{name}`; put it under `{within[name]}`"
    meant = [each for each in known if name.startswith(each) or each.startswith(name)]
    meant = meant or difflib.get_close_matches(name, known, n=1, cutoff=0.65)
    advice = f"did you mean `{meant[0]}`?" if meant else f"fields are {', '.join(known)}"
    return f"unknown field `{name}`; {advice}"


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


# -- files that the configuration names ----------------------------------------------------------------------

_SHORTEST_SECRET_BYTES: Final = 16
_IS_PATH: Final = re.compile(r"(File|Folder|^kubeconfig)$")
"""The names of fields that hold a path."""
_S = TypeVar("_S", bound=Strict)


def rooted(section: _S, *, folder: Path) -> _S:
    """Return the section with paths from the root. Its own count from the folder."""
    made: dict[str, Any] = {}
    for one in msgspec.structs.fields(section):
        value = getattr(section, one.name)
        if isinstance(value, Strict):
            made[one.name] = rooted(value, folder=folder)
        elif isinstance(value, tuple):
            made[one.name] = tuple(
                rooted(each, folder=folder) if isinstance(each, Strict) else each for each in value
            )
        elif value and _IS_PATH.search(one.encode_name):
            made[one.name] = os.path.normpath(folder / value)
    return msgspec.structs.replace(section, **made)


def paths_of(section: Strict, *, under: str) -> Iterator[tuple[str, str]]:
    """Yield the field and the path of each file that the section names."""
    for one in msgspec.structs.fields(section):
        value, field = getattr(section, one.name), f"{under}.{one.encode_name}"
        if isinstance(value, Strict):
            yield from paths_of(value, under=field)
        elif value and _IS_PATH.search(one.encode_name):
            yield field, value


def read_file(path: str, *, field: str) -> bytes:
    """Return the content of a file. Raise ConfigError if the file cannot be read."""
    with usable(f"{field}: {path}"):
        return Path(path).read_bytes()


def read_secret(path: str, *, field: str) -> bytes:
    """Return the secret in a file. Raise ConfigError if it cannot be read, or if it is too short."""
    secret = read_file(path, field=field).strip()
    if len(secret) < _SHORTEST_SECRET_BYTES:
        raise ConfigError(
            f"{field}: {path}: holds {len(secret)} bytes; a secret that nobody can guess needs "
            f"{_SHORTEST_SECRET_BYTES} or more"
        )
    return secret
