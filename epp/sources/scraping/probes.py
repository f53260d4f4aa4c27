"""Sends requests of one token to servers that have failed, off the pick path, to see whether they still fail.

`endpoints.failures` decides which servers to probe, and what follows from their answers. This module only
sends the requests. A probe asks for a streamed answer and reads all of it. So it also fails if the body never
comes, tells of an error or ends without a token. Called by `app`; everything runs on the event loop's thread.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import aiohttp
import msgspec

from epp.base.types import ApiKind
from epp.picker.endpoints.failures import is_fault
from epp.picker.endpoints.marks import Probe, Verdict
from epp.request.response import ResponseReader
from epp.sources.scraping.sessions import ApiKey, bounded_body, session_for_questions

_LOOK_S: Final = 0.1
_TIMEOUT_S: Final = 3.0
_MOST_ANSWER_BYTES: Final = 64 * 2**10
_HEADERS: Final = {"Content-Type": "application/json"}


class Probes:
    """Call `run`. counts: the probes by result."""

    def __init__(
        self,
        *,
        due: Callable[[], Sequence[Probe]],
        on_verdict: Callable[[Probe, Verdict], None],
        key: ApiKey,
    ) -> None:
        """due: the probes to send now.
        on_verdict: called for each of them, even if `run` ends meanwhile.
        """
        self._due = due
        self._key = key
        self._on_verdict = on_verdict
        self._counts: Counter[Verdict] = Counter({"well": 0, "ill": 0, "refused": 0, "unclear": 0})

    @property
    def counts(self) -> Mapping[Verdict, int]:
        return self._counts

    async def run(self) -> None:
        session = session_for_questions(timeout_s=_TIMEOUT_S)
        async with session, asyncio.TaskGroup() as group:
            while True:
                for probe in self._due():
                    group.create_task(
                        self._send(session, probe), name=f"probe of {probe.state.endpoint.name}"
                    )
                await asyncio.sleep(_LOOK_S)

    async def _send(self, session: aiohttp.ClientSession, probe: Probe) -> None:
        verdict: Verdict = "unclear"
        try:
            verdict = await _ask(session, probe, self._key.headers())
        finally:
            self._counts[verdict] += 1
            self._on_verdict(probe, verdict)


async def _ask(session: aiohttp.ClientSession, probe: Probe, key: dict[str, str]) -> Verdict:
    url = f"http://{probe.state.endpoint.address}/v1/completions"
    question = {"model": probe.model, "prompt": "1", "max_tokens": 1, "stream": True}
    try:
        async with session.post(
            url, data=msgspec.json.encode(question), headers=_HEADERS | key, allow_redirects=False
        ) as response:
            body = await bounded_body(response, most_bytes=_MOST_ANSWER_BYTES)
            if body is None:
                return "unclear"
            told = _told(response, body) if response.status < 400 else None
            return verdict_of(told or response.status, about_model=bool(probe.about))
    except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError):
        return "unclear"  # the scrapes of this server fail too, and say why
    except TimeoutError:
        return "unclear" if probe.queued else "ill"
    except (aiohttp.ClientError, OSError, ValueError):
        return "ill"


def _told(response: aiohttp.ClientResponse, body: bytes) -> int | None:
    """Return the status that the body tells. None: it tells none."""
    reader = ResponseReader(
        kind=ApiKind.COMPLETIONS,
        content_type=response.headers.get("content-type", ""),
        content_encoding=response.headers.get("content-encoding", ""),
    )
    reader.feed(body, now=0.0)
    return reader.finish().told


def verdict_of(status: int, *, about_model: bool) -> Verdict:
    """about_model: whether the server was said not to have this model.

    Other refusals may say nothing: the server may want a key, or may not support completions.
    """
    if status < 400:
        return "well"
    return "ill" if is_fault(status) or (status == 404 and about_model) else "refused"
