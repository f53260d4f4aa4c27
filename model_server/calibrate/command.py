"""Fit the cost model to a running server. The command measures prefill, decoding, and both together, over the
server's OpenAI API.

The server should do nothing else during the measurement. It has to stream one token in each event, and to
accept token ids as prompts and `ignore_eos`. This model server does so with --runner hf, and so does vLLM.
The API key, if the server asks for one, comes from the environment variable VLLM_API_KEY. The costs go to
standard output, and `serve --cost FILE` reads a file of them.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import aiohttp
import msgspec

from model_server.calibrate.cost_file import cost_document
from model_server.calibrate.fit import FitError, fit
from model_server.calibrate.probes import LATE_AFTER_TOKENS, Probe, Sample, Trace, fastest, plan, sample_of

_LEAST_PROMPT_TOKENS: Final = 64
_ANSWER_TOKENS: Final = 80
"""Tokens of a context that are kept for the answer. The longest answer of a probe has 64."""
_TOKEN_IDS: Final = range(100, 1000)
"""These ids are ordinary tokens in every vocabulary."""
_NO_TIMEOUT: Final = aiohttp.ClientTimeout(total=None, sock_read=600)


class CalibrationError(Exception):
    """The server cannot be measured. The message says why, and what to do."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--url", required=True, metavar="URL", help="address of the server, for example http://127.0.0.1:8000"
    )
    parser.add_argument(
        "--model", metavar="NAME", help="model to measure (default: the first in the server's list)"
    )
    parser.add_argument(
        "--max-prompt-tokens",
        type=int,
        default=2048,
        metavar="N",
        help="longest prompt that is sent, in tokens; its prefill should take many times as long as a decode step (default %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Return 0 if the times were fitted, 1 if the server could not be measured or its times do not fit, 2
    for bad flags.
    """
    if args.max_prompt_tokens < _LEAST_PROMPT_TOKENS:
        print(f"model-server: --max-prompt-tokens must be at least {_LEAST_PROMPT_TOKENS}", file=sys.stderr)
        return 2
    if not args.url.startswith(("http://", "https://")):
        print("model-server: --url must be an http URL", file=sys.stderr)
        return 2
    try:
        print(asyncio.run(_calibrate(args)), end="")
    except* (CalibrationError, FitError, aiohttp.ClientError, OSError) as errors:
        print(f"model-server: {_first(errors)}", file=sys.stderr)
        return_code = 1
    else:
        return_code = 0
    return return_code


async def _calibrate(args: argparse.Namespace) -> str:
    key = os.environ.get("VLLM_API_KEY")
    headers = {"authorization": f"Bearer {key}"} if key else {}
    base = args.url.rstrip("/") + "/"
    async with aiohttp.ClientSession(base, headers=headers, connector=aiohttp.TCPConnector(limit=0)) as http:
        model, context_tokens = await _find_model(http, args.model)
        server = _ServerUnderTest(http, model)
        most = min(args.max_prompt_tokens, (context_tokens or sys.maxsize) - _ANSWER_TOKENS)
        if most < _LEAST_PROMPT_TOKENS:
            raise CalibrationError(
                f"a context of {context_tokens} tokens is too short: measure a model with a longer one"
            )
        probes = plan(max_prompt_tokens=most)
        await server.observe(probes[0])  # the first request is slow: the process compiles and allocates
        measured: dict[Probe, list[Sample]] = {probe: [] for probe in probes}
        for number, probe in enumerate(probes, start=1):
            print(f"\r{number}/{len(probes)} measurements", end="", file=sys.stderr, flush=True)
            sample = sample_of(probe, await server.observe(probe))
            if sample is not None:
                measured[probe].append(sample)
    print(file=sys.stderr)
    return cost_document(fit(fastest(measured)))


async def _find_model(http: aiohttp.ClientSession, wanted: str | None) -> tuple[str, int | None]:
    """Return a model's name and, if the server states it, its greatest length."""
    async with http.get("v1/models") as response:
        page = await response.read()
    try:
        response.raise_for_status()
        cards: Sequence[dict[str, Any]] = msgspec.json.decode(page)["data"]
    except (aiohttp.ClientResponseError, msgspec.DecodeError, KeyError, TypeError) as error:
        raise CalibrationError(
            f"GET v1/models answers {response.status} and no list of models: is this an OpenAI-compatible server?"
        ) from error
    for card in cards:
        if wanted in (None, card["id"]):
            length = card.get("max_model_len")
            return str(card["id"]), int(length) if length else None
    raise CalibrationError(
        f"the server has no model {wanted!r}; it has {', '.join(card['id'] for card in cards)}"
    )


class _Event(msgspec.Struct):
    choices: list[Any] = msgspec.field(default_factory=list)
    usage: dict[str, Any] | None = None


class _ServerUnderTest:
    """Sends probes, and notes when each token came."""

    def __init__(self, http: aiohttp.ClientSession, model: str) -> None:
        self._http = http
        self._model = model

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

    async def _ask(
        self, num_tokens: int, answer_tokens: int, seen: list[float], on_token: Callable[[], None]
    ) -> Trace:
        body = {
            "model": self._model,
            "prompt": random.choices(_TOKEN_IDS, k=num_tokens),
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


def _read(line: bytes) -> _Event | None:
    if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
        return None
    try:
        return msgspec.json.decode(line[len(b"data: ") :], type=_Event)
    except msgspec.MsgspecError as error:
        raise CalibrationError(f"an event of the stream cannot be read: {line[:200]!r}") from error


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the innermost error of the first group; the group's other errors follow from this one."""
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
