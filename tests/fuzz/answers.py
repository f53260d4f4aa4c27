"""Answers of model servers that the picker reads."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence

from epp.base.types import ApiKind
from epp.request.response import ResponseReader
from tests.fuzz.behind import OfBytes

_KINDS = (ApiKind.CHAT, ApiKind.COMPLETIONS, ApiKind.RESPONSES, ApiKind.MESSAGES)
_TYPES = ("text/event-stream", "application/json")


class SampledAnswers(OfBytes):
    """Each input is an answer. It is read in pieces, as an answer of every API, and with the model name
    that the client sent.
    """

    words: Sequence[bytes] = (
        *(
            b"data: ",
            b"\n\n",
            b"\r",
            b"data:\n",
            b"event: message_start\n",
            b"[DONE]",
            b'"usage":{',
            b'"model":"m"',
        ),
        *(b'"model": "m"', b'"delta":{"content":"', b'"completion_tokens":1e400', b"\\ud800", b'"index":-1'),
    )

    def __init__(self) -> None:
        usage = {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}
        chunk = {"model": "m", "choices": [{"index": 0, "delta": {"content": "hé"}}]}
        whole = {"model": "m", "choices": [{"index": 0, "message": {"content": "a"}}], "usage": usage}
        block = {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "a"}}
        done = {"type": "response.completed", "response": {"model": "m", "usage": {"input_tokens": 3}}}
        events = [chunk, chunk, chunk | {"choices": [], "usage": usage}, block, done]
        self.seeds: Sequence[bytes] = [
            b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)
            + b"data: [DONE]\n\n",
            json.dumps(whole).encode(),
            json.dumps(whole, separators=(",", ":")).encode(),
        ]
        self._turn = itertools.count()

    async def feed(self, data: bytes) -> bool:
        n = next(self._turn)
        size = (1, 7, 100, 20_000)[n % 4] if len(data) < 2_000 else 5_000
        reader = ResponseReader(
            kind=_KINDS[n % len(_KINDS)],
            content_type=_TYPES[n // 4 % 2],
            content_encoding="",
        )
        for at in range(0, len(data), size):
            reader.feed(data[at : at + size], now=float(n))
        reader.check_integrity()
        reader.finish()
        return True

    async def check(self) -> None: ...
