"""Defines the sections of a policy about reading metrics and sampled answers of the servers."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from epp.config.strict import Ratio, Strict


class Scrape(Strict, frozen=True):
    """The picker reads the metrics pages of the servers. No pick waits for a scrape."""

    path: Annotated[str, Meta(pattern="^/", max_length=256)] = "/metrics"
    """Path of the metrics page."""
    interval_seconds: Annotated[float, Meta(ge=0.05, le=60)] = 1.0
    """Time from one scrape of an endpoint to the next, varied at random by a tenth."""
    idle_interval_seconds: Annotated[float, Meta(ge=0.05, le=60)] = 4.0
    """Time from one scrape to the next of an idle endpoint: no request runs or waits there, and the picker
    has none in flight there. Within a second of sending a request there, the picker scrapes the endpoint at
    `intervalSeconds` again. A value below `intervalSeconds` has no effect."""
    timeout_seconds: Annotated[float, Meta(ge=0.05, le=60)] = 1.0
    """A scrape that takes longer than this counts as failed."""
    stale_after_seconds: Annotated[float, Meta(ge=0.1, le=600)] = 5.0
    """The picker ignores metrics older than this and counts only the requests that it sent itself."""
    failures_to_eject: Annotated[int, Meta(ge=1, le=100)] = 3
    """After this many failed scrapes in a row an endpoint gets no more requests."""
    max_page_bytes: Annotated[int, Meta(ge=1024, le=2**28)] = 4 * 2**20
    """A scrape counts as failed if its page is larger than this."""


class Sampling(Strict, frozen=True):
    """For a share of the requests the data plane streams the answer to the picker too. The picker learns from
    these answers.
    """

    share: Ratio = 0.01
    """Share of the requests whose answers are sampled. All other answers never pass through the picker."""
