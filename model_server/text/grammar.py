"""Lets an answer have only a form that JSON schemas describe, by llguidance: says which tokens of a real
model may follow, and makes up a small answer for a model without weights.

llguidance refuses the keywords of JSON schema that it does not know. It does not bound its work for patterns
that one text has to match together, nor for `multipleOf`, so `matcher` refuses schemas with many of them. It
is imported for the first such answer, so a server runs without it. Callers: the languages; the sampler, at
each token.
"""

import json
import math
import re
from collections.abc import Collection, Iterator, Sequence
from decimal import Decimal
from typing import Any

import numpy as np

from model_server.core.request import TokenId
from model_server.text.language import Alternative, SchemaError

_PLACE = re.compile(r"^at \d+\(\d+\): ")
"""The place in a grammar that only this module knows."""
NOT_INSTALLED = "run pip install 'prefix-gateway[structured]' for llguidance"
_MOST_BYTES = 4096
_LOOK_BACK_BYTES = 100
_IN_TEXT = b'word"@.-:/0123456789'
_OUTSIDE = b'}]:,"0123456789-.tfn[{'
"""The bytes of a made-up answer, the preferred ones first. The preferred ones end a text, a list or an
object.
"""
_JOINING = {"$ref", "anyOf", "oneOf"}
_JOINED = {"items", "prefixItems", "properties", "patternProperties", "additionalProperties", "propertyNames"}
_JOINED |= {"pattern", "format", "multipleOf", *_JOINING}
"""A schema with a key of the first set and another key of the second set joins patterns, as `allOf` does: one
text has to match several. The work for this doubles with each pattern.
"""
_MOST_JOINED = 8
_MOST_PATTERNS = 64
_MOST_PATTERN_CHARACTERS = 512
_MOST_DIVISOR = 5000
"""The bound of all numbers of `multipleOf` together, without their decimal points. A text has to be followed
through all remainders.
"""


class Grammar:
    """The constraint of one answer of a real model."""

    def __init__(self, matcher: Any, *, eos_token_ids: Sequence[TokenId]) -> None:
        self._matcher = matcher
        self._eos_token_ids = eos_token_ids
        self._num_seen = 0

    def __call__(self, answer: Sequence[TokenId]) -> Collection[int]:
        self._matcher.consume_tokens(list(answer[self._num_seen :]))
        self._num_seen = len(answer)
        return self._eos_token_ids if self._matcher.is_stopped() else _allowed(self._matcher)


def matcher(alternatives: Sequence[Alternative], tokenizer: Any = None) -> Any:
    """Return llguidance's matcher for texts of one of these forms. None is a tokenizer whose tokens are
    bytes. Raise SchemaError if a schema is not one, or is too much work, or llguidance cannot do it.
    """
    _check_work([one.schema for one in alternatives])
    try:
        from llguidance import LLMatcher, LLTokenizer  # noqa: PLC0415 - it is an extra
    except ImportError as error:
        raise SchemaError(NOT_INSTALLED) from error
    rules = [
        f"a{index}: {json.dumps(one.before)} a{index}_json {json.dumps(one.after)}\n"
        f"a{index}_json: %json {json.dumps(one.schema)}"
        for index, one in enumerate(alternatives)
    ]
    start = " | ".join(f"a{index}" for index in range(len(alternatives)))
    found = LLMatcher(tokenizer or LLTokenizer("byte"), "\n".join([f"start: {start}", *rules]), log_level=0)
    _check(found)
    return found


def _check_work(schemas: Sequence[Any]) -> None:
    patterns: list[str] = []
    divisors: list[int] = []
    joins = False
    for schema in _objects(schemas):
        patterns += [schema[key] for key in ("pattern", "format") if isinstance(schema.get(key), str)]
        patterns += schema["patternProperties"] if isinstance(schema.get("patternProperties"), dict) else []
        divisor = schema.get("multipleOf")
        if isinstance(divisor, float) and divisor % 1:
            divisor = int("".join(map(str, Decimal(repr(divisor)).as_tuple().digits)))
        if isinstance(divisor, int | float):
            divisors.append(max(1, abs(int(divisor))))
        joins |= "allOf" in schema or bool(_JOINING & schema.keys() and len(_JOINED & schema.keys()) > 1)
    most = _MOST_JOINED if joins else _MOST_PATTERNS
    if len(patterns) > most:
        where = " with allOf, or $ref or anyOf beside other keywords," if joins else ""
        raise SchemaError(f"a schema{where} may have at most {most} patterns and formats")
    if any(len(one) > _MOST_PATTERN_CHARACTERS for one in patterns):
        raise SchemaError(f"a pattern may have at most {_MOST_PATTERN_CHARACTERS} characters")
    if (math.prod if joins else sum)(divisors) > _MOST_DIVISOR:
        raise SchemaError(f"its numbers of multipleOf are together over {_MOST_DIVISOR}, without the points")


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    rest = [value]
    while rest:
        node = rest.pop()
        if isinstance(node, dict):
            yield node
        rest += node.values() if isinstance(node, dict) else node if isinstance(node, list) else []


def small_answer(alternatives: Sequence[Alternative]) -> str:
    """Return a small text of the first form. Raise SchemaError as `matcher` does, and if the text would be
    long.
    """
    found, text = matcher(alternatives[:1]), bytearray()
    while not found.is_accepting():
        if len(text) == _MOST_BYTES:
            raise SchemaError(f"its smallest text has more than {_MOST_BYTES} bytes")
        text.append(_best(text, _allowed(found)))
        found.consume_token(text[-1])
        _check(found)
    # A text of a schema may be a marker, which is not a token of an answer.
    return text.decode().replace("<|", "\\u003c|")


def _allowed(found: Any) -> Collection[int]:
    mask = np.frombuffer(found.compute_bitmask(), np.uint8)
    return np.unpackbits(mask, bitorder="little").nonzero()[0]


def _best(text: bytearray, allowed: Collection[int]) -> int:
    """Return the next byte: of those that occur least since the last quote, the preferred one. So a pattern
    that allows one byte for ever goes on to its end.
    """
    own = text[max(text.rfind(b'"') + 1, len(text) - _LOOK_BACK_BYTES) :]
    order = _IN_TEXT if text.count(b'"') % 2 else _OUTSIDE
    return min(map(int, allowed), key=lambda byte: (own.count(byte), order.find(byte) % 256, byte))


def _check(found: Any) -> None:
    if error := found.get_error():
        raise SchemaError(_PLACE.sub("", error.partition("\n")[0])[:300])
