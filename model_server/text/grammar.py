"""Lets an answer have only a form that JSON schemas describe, by llguidance: says which tokens of a real
model may follow, and makes up a small answer for a model without weights.

llguidance bounds its own work and refuses the keywords of JSON schema that it does not know. It is imported
for the first such answer, so a server runs without it. Callers: the languages; the sampler, at each token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from model_server.core.request import TokenId
from model_server.text.language import Alternative, SchemaError

_PLACE = re.compile(r"^at \d+\(\d+\): ")
"""The place in a grammar that only this module knows."""
_MOST_BYTES = 4096
_LOOK_BACK_BYTES = 100
_IN_TEXT = b'word"@.-:/0123456789'
_OUTSIDE = b'}]:,"0123456789-.tfn[{'
"""The bytes of a made-up answer, the preferred ones first. The preferred ones end a text, a list or an
object.
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
    bytes. Raise SchemaError if a schema is not one, or llguidance cannot do it.
    """
    try:
        from llguidance import LLMatcher, LLTokenizer  # noqa: PLC0415 - it is an extra
    except ImportError as error:
        raise SchemaError("run pip install 'prefix-gateway[structured]' for llguidance") from error
    rules = [
        f"a{index}: {json.dumps(one.before)} a{index}_json {json.dumps(one.after)}\n"
        f"a{index}_json: %json {json.dumps(one.schema)}"
        for index, one in enumerate(alternatives)
    ]
    start = " | ".join(f"a{index}" for index in range(len(alternatives)))
    found = LLMatcher(tokenizer or LLTokenizer("byte"), "\n".join([f"start: {start}", *rules]), log_level=0)
    _check(found)
    return found


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
