"""Reads the measures of a streamed answer of the OpenAI API from its pieces and their times. Pure: no clock,
no socket.

Pieces are kept as they come and read once the answer is whole, so that reading costs nothing between two
pieces. The time of a token is the arrival of the piece with the last byte of its event. The client and the
unit tests call this module.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Final

import msgspec

_DATA: Final = b"data:"
_DONE: Final = b"[DONE]"


class _Text(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: Any = None

    @property
    def carries(self) -> bool:
        return bool(self.content or self.reasoning_content or self.tool_calls)


class _Choice(msgspec.Struct):
    delta: _Text | None = None
    text: str | None = None

    @property
    def carries(self) -> bool:
        return bool(self.text) or (self.delta is not None and self.delta.carries)

    @property
    def new_text(self) -> str:
        return self.text or (self.delta.content if self.delta is not None else None) or ""


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = msgspec.field(default_factory=list)
    usage: _Usage | None = None
    error: Any = None


_EVENT: Final = msgspec.json.Decoder(_Event)


class AnswerError(Exception):
    """An answer that does not count. `kind` is its class in the statistics: one of a few values, so that
    failures can be added up.
    """

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(f"{kind}: {detail}" if detail else kind)
        self.kind = kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One whole answer. Its times are those of its pieces."""

    first_token_at: float
    last_token_at: float
    longest_gap_s: float
    """The longest time between two pieces with tokens. It is 0 if there is only one piece."""
    output_tokens: int
    tokens_counted: bool
    """True if the server counted the tokens. Without usage, `output_tokens` is the number of events, which is
    at most the number of tokens.
    """
    prompt_tokens: int
    cached_tokens: int
    text: str

    @property
    def inter_token_s(self) -> float | None:
        """Return the mean time from one token to the next, or None if there is only one token."""
        if self.output_tokens < 2:
            return None
        return (self.last_token_at - self.first_token_at) / (self.output_tokens - 1)


def read_answer(pieces: Sequence[tuple[float, bytes]]) -> Answer:
    """Read an answer. `pieces` are pairs (arrived at, bytes) in order, of a body that was complete by HTTP.
    Raise AnswerError if the answer is not complete.
    """
    body = b"".join(piece for _, piece in pieces)
    ends = list(accumulate(len(piece) for _, piece in pieces))
    moments: list[float] = []
    texts: list[str] = []
    usage: _Usage | None = None
    tokens = 0
    done = False
    position = 0
    for line in body.splitlines(keepends=True):
        position += len(line)
        if not line.startswith(_DATA):
            continue
        data = line[len(_DATA) :].strip()
        if data == _DONE:
            done = True
            break
        event = _event(data, last=position == len(body))
        usage = event.usage or usage
        if any(choice.carries for choice in event.choices):
            tokens += 1
            moments.append(pieces[bisect_left(ends, position)][0])
            texts += [choice.new_text for choice in event.choices]
    if not done:
        raise AnswerError("cut", f"the body ended after {len(body)} bytes without [DONE]")
    if not moments:
        raise AnswerError("malformed", "the answer has no token")
    return _answer(moments, texts, usage, events=tokens)


def _event(data: bytes, *, last: bool) -> _Event:
    try:
        event = _EVENT.decode(data)
    except msgspec.MsgspecError as error:
        if last:  # The event is not malformed, but cut off.
            raise AnswerError("cut", "the body ended within an event") from error
        raise AnswerError("malformed", f"an event is not what the API sends: {error}") from error
    if event.error is not None:
        raise AnswerError("error event", str(event.error)[:200])
    return event


def _answer(moments: Sequence[float], texts: Sequence[str], usage: _Usage | None, *, events: int) -> Answer:
    details = usage.prompt_tokens_details if usage else None
    return Answer(
        first_token_at=moments[0],
        last_token_at=moments[-1],
        longest_gap_s=max((b - a for a, b in pairwise(moments)), default=0.0),
        output_tokens=usage.completion_tokens if usage else events,
        tokens_counted=usage is not None,
        prompt_tokens=usage.prompt_tokens if usage else 0,
        cached_tokens=(details.cached_tokens or 0) if details else 0,
        text="".join(texts),
    )
