"""Asks every server for its list of models, slowly, off the pick path.

One loop checks ten times a second which servers are due. After the start each pass asks at most `_AT_ONCE`,
so any number of servers that hang delay the others by a few passes, and some 400 questions are open. Lists
are passed on in portions, since each portion makes the fleet build a new index. While a server cannot be
asked, its last list stays. If a request names a model that no server lists, the servers are asked again soon,
because an adapter may have been loaded since, but at most `_SOON_PER_S` servers in a second.

Called by `app`; everything runs on the event loop's thread.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from random import Random
from typing import Annotated, Final, TypeVar

import msgspec
from msgspec import Meta, Raw, Struct
from msgspec.json import Decoder

from epp.base.types import Endpoint, EndpointName, ModelCard, ModelList
from epp.config.settings import Models
from epp.request.client_names import MAX_NAME_CHARS
from epp.sources.scraping.metrics_page import MetricsError
from epp.sources.scraping.page_client import NEW_PER_S, START_S, ApiKey, PageClient, in_words

logger = logging.getLogger(__name__)

_LOOK_S: Final = 0.1
_AT_ONCE: Final = 32
_SOON_S: Final = 5.0
_SOON_PER_S: Final = 20
_TIMEOUT_S: Final = 5.0
_MOST_PAGE_BYTES: Final = 512 * 2**10
"""vLLM writes 600 bytes for each model."""
_JITTER: Final = 0.1
_T = TypeVar("_T")
MOST_CARDS: Final = 512
"""Most models and adapters of one server."""
_OWNER: Final = Decoder(Annotated[str, Meta(max_length=256)])
_NAME: Final = Decoder(Annotated[str, Meta(max_length=MAX_NAME_CHARS)])
_NUMBER: Final = Decoder(Annotated[int, Meta(ge=0, le=2**53)])


@dataclass(slots=True)
class _ListedServer:
    endpoint: Endpoint
    due_at: float
    asked_at: float = -inf
    asking: bool = False
    listed: bool | None = None
    """Whether its last answer was a list. None: it has not been asked yet."""


@dataclass(slots=True, kw_only=True, eq=False)
class ModelLists:
    """Call `run`."""

    settings: Models
    key: ApiKey
    on_lists: Callable[[Mapping[EndpointName, ModelList | None]], None]
    unknown_asked: Callable[[], int]
    """Returns the number of requests so far for a model that no server lists."""
    clock: Callable[[], float]
    rng: Random
    _unknown_seen: int = field(default=0, init=False)
    _servers: dict[EndpointName, _ListedServer] = field(default_factory=dict, init=False)
    _answers: dict[EndpointName, ModelList | None] = field(default_factory=dict, init=False)
    _given_at: float = field(default=inf, init=False)
    """When the first list of endpoints came."""

    def set_endpoints(self, endpoints: Sequence[Endpoint]) -> None:
        """Follow a new list. A new server, or a new process of a known server, is asked at once."""
        self._given_at = min(self._given_at, self.clock())
        before, self._servers = self._servers, {}
        for endpoint in endpoints:
            server = before.get(endpoint.name)
            if server is None or server.endpoint.process != endpoint.process:
                server = _ListedServer(endpoint, due_at=self.clock())
                self._answers.pop(endpoint.name, None)
            server.endpoint = endpoint
            self._servers[endpoint.name] = server

    @property
    def asked_all(self) -> bool:
        """Whether all servers have been asked once, and their lists are in use, or this took too long."""
        unasked = any(server.listed is None for server in self._servers.values())
        waits = self.settings.ask and (self._answers or unasked)
        return not waits or self.clock() - self._given_at > START_S

    async def run(self) -> None:
        """Run until cancelled. Asks no server if the settings say so."""
        if not self.settings.ask:
            await asyncio.get_running_loop().create_future()
        for server in self._servers.values():
            server.asking = False
        async with asyncio.TaskGroup() as group:
            while True:
                answers, self._answers = self._answers, {}
                if answers:
                    self.on_lists(answers)
                started = self.clock() > self._given_at + START_S
                for server in self._due(now=self.clock())[: _AT_ONCE if started else None]:
                    server.asking = True
                    group.create_task(self._ask(server), name=f"models of {server.endpoint.name}")
                    # Each connects in a turn of its own, so that requests come between.
                    await asyncio.sleep(1 / NEW_PER_S if started else 0)
                await asyncio.sleep(_LOOK_S)

    # -- parts -----------------------------------------------------------------------------------------------

    def _due(self, *, now: float) -> Sequence[_ListedServer]:
        self._look_for_new_models(now=now)
        due = (s for s in self._servers.values() if not s.asking and s.due_at <= now)
        return sorted(due, key=lambda server: server.due_at)

    def _look_for_new_models(self, *, now: float) -> None:
        asked = self.unknown_asked()
        if asked == self._unknown_seen:
            return
        self._unknown_seen = asked
        after_s = soon_s(len(self._servers))
        for server in self._servers.values():
            if server.listed:
                server.due_at = min(server.due_at, max(now, server.asked_at + after_s))

    async def _ask(self, server: _ListedServer) -> None:
        name, client = server.endpoint.name, PageClient(server.endpoint.address)
        server.asked_at = self.clock()
        wait_s, listed = self.settings.interval_seconds, None
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                answer = await client.ask(
                    "/v1/models", most_bytes=_MOST_PAGE_BYTES, headers=self.key.headers()
                )
            listed = parse_model_page(answer.body)
        except (MetricsError, OSError, ValueError) as error:
            wait_s = min(wait_s, soon_s(len(self._servers)))
            if server.listed is not False:
                late = isinstance(error, TimeoutError)
                why = f"no answer within {_TIMEOUT_S:g} s" if late else in_words(error)
                logger.info("%s does not list its models: %s", name, why)
        finally:
            client.close()
        server.listed, server.asking = listed is not None, False
        server.due_at = self.clock() + wait_s * (1 + self.rng.uniform(-_JITTER, _JITTER))
        if self._servers.get(name) is server:  # otherwise the server left, or another process came meanwhile
            self._answers[name] = listed


def soon_s(servers: int) -> float:
    """Return how soon each of so many servers may be asked again, because of requests for unknown models or
    because it did not answer.
    """
    return max(_SOON_S, servers / _SOON_PER_S)


# -- a server's answer ---------------------------------------------------------------------------------------


class _Card(Struct, gc=False):
    id: str
    parent: str | None = None
    root: Raw = Raw(b"null")
    created: Raw = Raw(b"null")
    owned_by: Raw = Raw(b"null")
    max_model_len: Raw = Raw(b"null")


class _ListPage(Struct, gc=False):
    data: list[_Card]


_DECODE: Final = Decoder(_ListPage)


def parse_model_page(page: bytes | bytearray) -> ModelList:
    """Return a server's answer to `GET /v1/models`: OpenAI's list of models, as vLLM and others write it.

    Strict about fields that routing uses (`id`, `parent`), and lenient about all others: a field of the wrong
    type is left out. A list that is too long or empty is refused, so the list of this server counts as
    unknown. Raises MetricsError for anything but a list of models.
    """
    try:
        cards = _DECODE.decode(page).data
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise MetricsError(f"the answer is not a list of models: {str(error)[:200]}") from error
    if not 0 < len(cards) <= MOST_CARDS:
        raise MetricsError(f"the list has {len(cards)} models; only lists of 1 to {MOST_CARDS} are read")
    if not all(
        0 < len(name) <= MAX_NAME_CHARS for card in cards for name in (card.id, card.parent or card.id)
    ):
        raise MetricsError(f"the name of a model is empty or has more than {MAX_NAME_CHARS} characters")
    return ModelList(tuple(_card(card) for card in cards))


def _card(card: _Card) -> ModelCard:
    return ModelCard(
        id=card.id,
        created=_value(card.created, _NUMBER) or 0,
        owned_by=_value(card.owned_by, _OWNER) or "",
        root=_value(card.root, _NAME),
        parent=card.parent or None,
        max_model_len=_value(card.max_model_len, _NUMBER),
    )


def _value(raw: Raw, decoder: Decoder[_T]) -> _T | None:
    """Return a value of a field. None: it is of another type, or too long or large."""
    try:
        return decoder.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
