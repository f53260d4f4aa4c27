"""Reads every model server's metrics page at its own pace, off the pick path.

Each endpoint has one task. If a server hangs, sends garbage or sends without end, the timeout and the bounds
of its task end this, and the other endpoints never wait. First scrapes are spread over one interval and later
scrapes are jittered, so that a fleet is not read in one burst. A server where nothing runs is read less often
until it gets a request, and servers that become idle together are spread over that longer interval. A task
that waits looks once a second whether a changed policy, or a request to its server, has made its scrape due.
The more servers have never answered, the less often each of them is asked again.

The scraper passes the numbers of each page to `on_metrics`, or None for a failed scrape. A server that has
never given a number but answers (404, a page of another kind) is up: its numbers are all unknown. It answers
no question about them: it remembers when each endpoint last answered, the error of its last failed scrape,
and the numbers of its last page for the next one, which may be equal. Called by `app`; everything runs on the
event loop's thread.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf
from random import Random
from typing import Final

from epp.base.types import Address, Endpoint, EndpointMetrics, EndpointName
from epp.config.policy import Scrape
from epp.sources.keep import Keep
from epp.sources.scraping.metrics_page import MetricsError, PageReader
from epp.sources.scraping.page_client import NEW_PER_S, START_S, NoPageError, PageClient, in_words

logger = logging.getLogger(__name__)

_JITTER: Final = 0.1
_MOST_PAGE_BYTES: Final = 4 * 2**20
_EARLY_S: Final = 0.002
"""Timers of the event loop may fire early by this much."""
_TICK_S: Final = 0.1
"""Waiting tasks look at these moments, so that many of them share one turn of the event loop."""
_IN_A_TURN: Final = 8
"""Servers that are connected, or come and go, in one turn of the event loop. Some 2 ms. With one in a turn, a
busy picker took seven times as long to find that 300 servers are away."""
_PAGES_PER_S: Final = 200
"""Reading a page takes the picker up to half a millisecond, so this takes a tenth of a core."""
_AGAIN_PER_S: Final = 50
"""Servers that are asked again in a second although they have never answered. There may be thousands."""


@dataclass(slots=True, eq=False)
class ScrapedServer:
    """One endpoint that is scraped."""

    endpoint: Endpoint
    client: PageClient
    own_path: str
    """The path of its page. Empty: the policy says it."""
    answered_at: float | None = None
    """None: it has never answered."""
    error: str = ""
    """Why the last scrape brought no numbers. Empty: it brought some."""
    has_numbers: bool = False
    """Whether a page of it has ever been read."""
    idle: bool = False
    """Whether no request runs or waits there, by its last page."""
    reader: PageReader = field(default_factory=PageReader)


@dataclass(slots=True, kw_only=True, eq=False)
class Scraper:
    """Scrapes the endpoints of `set_endpoints` while `run` runs."""

    settings: Callable[[], Scrape]
    """Called before every scrape."""
    on_metrics: Callable[[EndpointName, EndpointMetrics | None], None]
    """Must not block."""
    in_use: Callable[[EndpointName], bool]
    """Whether the picker has sent the endpoint something that its last page may not show."""
    clock: Callable[[], float]
    """Monotonic seconds."""
    keep: Keep
    rng: Random
    targets: dict[EndpointName, ScrapedServer] = field(default_factory=dict, init=False)
    """Others only read it, for metrics and pages."""
    _changed: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    """Set when the targets are others than those that have tasks."""
    _silent: set[ScrapedServer] = field(default_factory=set, init=False)
    """The targets that have never answered."""
    _turn: asyncio.Semaphore = field(default_factory=partial(asyncio.Semaphore, _IN_A_TURN), init=False)
    """Any number of servers may be new or fail together, and requests come between them."""
    _new_turn: asyncio.Semaphore = field(default_factory=partial(asyncio.Semaphore, _IN_A_TURN), init=False)
    """For the first questions to new servers, which wait longer."""
    _given_at: float = field(default=inf, init=False)
    """When the first list of endpoints came."""

    async def run(self) -> None:
        """Scrape until cancelled. If one server's page makes its task fail, `keep` starts the task again."""
        tasks: dict[ScrapedServer, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as group:
            while True:
                self._changed.clear()
                for number, target in enumerate(tasks.keys() ^ self.targets.values(), 1):
                    if target in tasks:
                        tasks.pop(target).cancel()
                    else:
                        follow = self.keep("scrape", partial(self._follow, target))
                        tasks[target] = group.create_task(follow, name=f"scrape of {target.endpoint.name}")
                    if number % _IN_A_TURN == 0:
                        await asyncio.sleep(0)
                await self._changed.wait()

    def set_endpoints(self, endpoints: Sequence[Endpoint]) -> None:
        """Follow a new list. Nothing is reported of removed endpoints; the scrapes of all others continue."""
        self._given_at = min(self._given_at, self.clock())
        before, self.targets = self.targets, {}
        for endpoint in endpoints:
            target = before.get(endpoint.name)
            if target is None or not _same_server(endpoint, target.endpoint):
                target = ScrapedServer(endpoint, *_page_of(endpoint))
            target.endpoint = endpoint
            self.targets[endpoint.name] = target
        self._silent = {target for target in self.targets.values() if target.answered_at is None}
        self._changed.set()

    async def _follow(self, target: ScrapedServer) -> None:
        """Scrape one endpoint for ever, by the current settings."""
        started_at, intervals = self.clock(), self.rng.random()
        try:
            while True:
                await self._wait(target, since=started_at, intervals=intervals)
                # The interval is from start to start, so a slow server is read as often as others.
                started_at, intervals = self.clock(), 1 + self.rng.uniform(-_JITTER, _JITTER)
                was_idle, had_error = target.idle, bool(target.error)
                if target.error or not target.has_numbers:
                    new = not had_error and self.clock() > self._given_at + START_S
                    async with self._new_turn if new else self._turn:
                        await asyncio.sleep(_IN_A_TURN / NEW_PER_S if new else 0)
                self._report(target, *await self._scrape(target))
                if (target.idle and not was_idle) or (target in self._silent and not had_error):
                    # Servers that became idle or failed together are spread over the longer interval.
                    intervals = self.rng.random()
        finally:
            target.client.close()

    async def _wait(self, target: ScrapedServer, *, since: float, intervals: float) -> None:
        """Wait until so many intervals have passed. The length of an interval may change meanwhile."""
        while (left_s := since + intervals * self._interval_s(target) - self.clock()) > _EARLY_S:
            # The random part keeps apart the tasks that began to wait together.
            look_s = self.rng.randint(8, 10) * _TICK_S - self.clock() % _TICK_S
            await asyncio.sleep(min(left_s, look_s))

    def _interval_s(self, target: ScrapedServer) -> float:
        settings = self.settings()
        soon_s = min(1.0, settings.stale_after_seconds / 2)  # no page may be stale because the fleet is large
        busy_s = max(settings.interval_seconds, min(soon_s, len(self.targets) / _PAGES_PER_S))
        if target.error and target in self._silent:
            return max(busy_s, len(self._silent) / _AGAIN_PER_S)
        if target.idle and not self.in_use(target.endpoint.name):
            return max(busy_s, settings.idle_interval_seconds)
        return busy_s

    async def _scrape(self, target: ScrapedServer) -> tuple[EndpointMetrics | None, str]:
        """Return the numbers, if the server answered, and why there are none."""
        settings = self.settings()
        try:
            async with asyncio.timeout(settings.timeout_seconds):
                answer = await target.client.ask(
                    target.own_path or settings.path, most_bytes=_MOST_PAGE_BYTES
                )
            return target.reader.read(answer.body, scraped_at=self.clock()), ""
        except TimeoutError:
            return None, f"no answer within {settings.timeout_seconds:g} s"
        except MetricsError as error:
            down = target.has_numbers or (isinstance(error, NoPageError) and not 0 < error.status < 500)
            return None if down else EndpointMetrics(scraped_at=self.clock()), str(error)
        except (OSError, ValueError) as error:
            return None, in_words(error)

    def _report(self, target: ScrapedServer, metrics: EndpointMetrics | None, error: str) -> None:
        name, address = target.endpoint.name, target.endpoint.address
        if self.targets.get(name) is not target:
            return  # it left while it was asked
        if error and not target.error:
            if metrics is not None:
                effect = "only the load that the picker sent there counts"
            else:
                effect = "the endpoint gets no requests while others answer"
                if target not in self._silent:
                    effect = f"after {self.settings().failures_to_eject} failed scrapes in a row {effect}"
            logger.warning("scrape of %s at %s fails: %s; %s", name, address, error, effect)
        elif target.error and not error:
            logger.info("scrape of %s at %s works again", name, address)
        target.error = error
        target.has_numbers = target.has_numbers or not error
        target.idle = metrics is not None and metrics.inside == 0
        if metrics is not None:
            target.answered_at = metrics.scraped_at
            self._silent.discard(target)
        self.on_metrics(name, metrics)


def _page_of(endpoint: Endpoint) -> tuple[PageClient, str]:
    """Return the client of its page, and the path if the endpoint names one."""
    port, slash, own_path = endpoint.metrics.partition("/")
    address = Address(endpoint.address.host, int(port[1:])) if port else endpoint.address
    return PageClient(address), f"/{own_path}" if slash else ""


def _same_server(new: Endpoint, old: Endpoint) -> bool:
    """Return whether process and page are the same. Labels and adapters may change without a new process."""
    return (new.address, new.incarnation, new.metrics) == (old.address, old.incarnation, old.metrics)
