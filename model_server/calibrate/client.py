"""Sends probes to a running server over the OpenAI API and records when each token came.
Caller: the command.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from typing import Any

import aiohttp
import msgspec

from model_server.calibrate.probes import LATE_AFTER_TOKENS, Probe, Trace

_TOKEN_IDS = range(100, 1000)
"""These ids are ordinary tokens in every vocabulary."""
_NO_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_read=600)


class CalibrationError(Exception):
    """The server cannot be measured. The message says why, and what to do."""


class _Event(msgspec.Struct):
    choices: list[Any] = msgspec.field(default_factory=list)
    usage: dict[str, Any] | None = None


_EVENT = msgspec.json.Decoder(_Event)


class ServerUnderTest:
    def __init__(self, http: aiohttp.ClientSession, *, model: str, rng: random.Random) -> None:
        self._http = http
        self._model = model
        self._rng = rng

    async def observe(self, probe: Probe) -> list[Trace]:
        """Send a probe and return the times of its tokens. Raise CalibrationError or aiohttp.ClientError."""
        times: list[list[float]] = [[] for _ in probe.together]
        ready = asyncio.Event()

        def on_token() -> None:
            if all(len(one) >= LATE_AFTER_TOKENS for one in times):
                ready.set()

        async with asyncio.TaskGroup() as tasks:
            sent = [
                tasks.create_task(self._ask(length, probe.answer_tokens, seen, on_token))
                for length, seen in zip(probe.together, times, strict=True)
            ]
            if probe.late_tokens is not None:
                await ready.wait()
                sent.append(tasks.create_task(self._ask(probe.late_tokens, 1, [], on_token)))
        return [task.result() for task in sent]

    async def ask(self, num_tokens: int, *, answer_tokens: int) -> Trace:
        """Send one request by itself. Raise CalibrationError or aiohttp.ClientError."""
        return await self._ask(num_tokens, answer_tokens, [], lambda: None)

    async def _ask(self, num_tokens: int, answer_tokens: int, seen: list[float], on_token: Any) -> Trace:
        body = {
            "model": self._model,
            "prompt": self._rng.choices(_TOKEN_IDS, k=num_tokens),
            "max_tokens": answer_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        sent_s = time.monotonic()
        num_reported = 0
        async with self._http.post("v1/completions", json=body, timeout=_NO_TIMEOUT) as response:
            if response.status != 200:
                raise CalibrationError(
                    f"the server answers {response.status}: {(await response.text())[:500]}"
                )
            async for line in response.content:
                event = _read(line)
                if event is not None and event.choices:
                    seen.append(time.monotonic())
                    on_token()
                elif event is not None and event.usage is not None:
                    num_reported = int(event.usage["completion_tokens"])
        if num_reported != len(seen):
            raise CalibrationError(
                f"{num_reported} tokens came in {len(seen)} events, but the time of each token is needed: "
                "start the server with --stream-interval 1 and without speculation"
            )
        return Trace(sent_s, seen)


async def find_model(http: aiohttp.ClientSession, wanted: str | None) -> tuple[str, int | None]:
    """Return a model's name and, if the server states it, its greatest length. Raise CalibrationError if the
    server has no such model.
    """
    async with http.get("v1/models") as response:
        if response.status != 200:
            raise CalibrationError(
                f"GET v1/models answers {response.status}: is this an OpenAI-compatible server?"
            )
        try:
            cards: Sequence[dict[str, Any]] = msgspec.json.decode(await response.read())["data"]
        except (msgspec.DecodeError, KeyError, TypeError) as error:
            raise CalibrationError(
                "The answer to GET v1/models is not a list of models: is this an OpenAI-compatible server?"
            ) from error
    for card in cards:
        if wanted in (None, card["id"]):
            length = card.get("max_model_len")
            return str(card["id"]), int(length) if length else None
    raise CalibrationError(
        f"the server has no model {wanted!r}; it has {', '.join(card['id'] for card in cards)}"
    )


def _read(line: bytes) -> _Event | None:
    if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
        return None
    try:
        return _EVENT.decode(line[len(b"data: ") :])
    except msgspec.MsgspecError as error:
        raise CalibrationError(f"an event of the stream cannot be read: {line[:200]!r}") from error
