"""Sends requests of one token to servers that have failed, off the pick path, to see whether they still fail.

`endpoints.failures` decides which servers to probe, and what follows from their answers. This module only
sends the requests. A probe asks for a streamed answer and reads all of it. So it also fails if the body never
comes, tells of an error or ends without a token. Called by `app`; everything runs on the event loop's thread.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from epp.base.types import ApiKind
from epp.picker.endpoints.marks import Probe, Verdict, is_fault
from epp.request.response import PARTIAL, ResponseReader
from epp.sources.scraping.metrics_page import MetricsError
from epp.sources.scraping.page_client import ApiKey, NoPageError, Page, PageClient

_LOOK_S: Final = 0.1
_CONNECT_S: Final = 1.5
_TIMEOUT_S: Final = 3.0
_NO_ANSWER: Final = 502
"""The status of a server that breaks off, or answers with anything but a token."""
_MOST_ANSWER_BYTES: Final = 64 * 2**10
_READ_TYPES: Final = ("text/event-stream", "application/json", "text/html", "application/xhtml+xml")
_HEADERS: Final = {"Content-Type": "application/json"}


@dataclass(slots=True, kw_only=True, eq=False)
class Probes:
    """Call `run`."""

    due: Callable[[], Sequence[Probe]]
    """Returns the probes to send now."""
    on_verdict: Callable[[Probe, Verdict], None]
    """Called for each of them, even if `run` ends meanwhile."""
    key: ApiKey
    counts: Counter[Verdict] = field(
        default_factory=lambda: Counter({"well": 0, "ill": 0, "refused": 0, "unclear": 0}), init=False
    )
    """The probes by result."""

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            while True:
                for probe in self.due():
                    group.create_task(self._send(probe), name=f"probe of {probe.state.endpoint.name}")
                await asyncio.sleep(_LOOK_S)

    async def _send(self, probe: Probe) -> None:
        verdict: Verdict = "unclear"
        client = PageClient(probe.state.endpoint.address)
        try:
            verdict = await _ask(client, probe, self.key.headers())
        finally:
            client.close()
            self.counts[verdict] += 1
            self.on_verdict(probe, verdict)


async def _ask(client: PageClient, probe: Probe, key: dict[str, str]) -> Verdict:
    try:
        async with asyncio.timeout(_CONNECT_S):
            await client.connect()
    except (NoPageError, TimeoutError):
        return "unclear"  # the scrapes of this server fail too, and say why
    body = msgspec.json.encode({"model": probe.model, "prompt": "1", "max_tokens": 1, "stream": True})
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            answer = await client.ask(
                "/v1/completions", most_bytes=_MOST_ANSWER_BYTES, headers=_HEADERS | key, body=body
            )
        if (status := _status_of(answer)) is None:
            return "unclear"
    except TimeoutError:
        return "unclear" if probe.queued else "ill"
    except NoPageError as error:
        status = error.status if error.status >= 300 else _NO_ANSWER
    except MetricsError:
        return "unclear"  # the answer is too long to be read
    except (OSError, ValueError):
        status = _NO_ANSWER
    return verdict_of(status, about_model=bool(probe.mark.about))


def _status_of(answer: Page) -> int | None:
    """Return the status that the body shows. A compressed body is good. None: only clients can read it."""
    if answer.fields.get(b"content-encoding", b"") not in (b"", b"identity"):
        return 200
    media_type = answer.fields.get(b"content-type", b"").decode("latin-1").partition(";")[0].strip()
    # Some servers send events as text, or without a type.
    read_as = media_type if media_type.endswith("json") else "text/event-stream"
    reader = ResponseReader(kind=ApiKind.COMPLETIONS, content_type=read_as, content_encoding="")
    reader.feed(bytes(answer.body), now=0.0)
    known = not answer.body or media_type in _READ_TYPES
    read = reader.finish()
    if read.status == PARTIAL and read.first_token_at is None:
        return _NO_ANSWER if known else None
    return read.status


def verdict_of(status: int, *, about_model: bool) -> Verdict:
    """about_model: whether the server was said not to have this model.

    Other refusals may say nothing: the server may want a key, or may not support completions.
    """
    if status < 300:
        return "well"
    return "ill" if is_fault(status) or (status == 404 and about_model) else "refused"
