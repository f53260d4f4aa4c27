"""The sections of a policy that say what the picker reads of the servers:
metrics pages and sampled answers.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from epp.config.strict import Ratio, Strict


class Scrape(Strict, frozen=True):
    """Reading the metrics pages of the servers. No pick waits for a scrape."""

    path: Annotated[str, Meta(pattern="^/", max_length=256, description="Path of the metrics page.")] = (
        "/metrics"
    )
    interval_seconds: Annotated[
        float,
        Meta(ge=0.05, le=60, description="Time from one scrape to the next, varied at random by a tenth."),
    ] = 1.0
    idle_interval_seconds: Annotated[
        float,
        Meta(
            ge=0.05,
            le=60,
            description="Time from one scrape to the next of an endpoint where nothing runs or waits and where the picker has no request. "
            "The picker reads the endpoint at `intervalSeconds` again within a second of sending a request there. "
            "Below `intervalSeconds` it has no effect.",
        ),
    ] = 4.0
    timeout_seconds: Annotated[
        float, Meta(ge=0.05, le=60, description="A scrape that takes longer has failed.")
    ] = 1.0
    stale_after_seconds: Annotated[
        float,
        Meta(
            ge=0.1,
            le=600,
            description="The picker ignores metrics older than this and counts only the requests that it sent itself.",
        ),
    ] = 5.0
    failures_to_eject: Annotated[
        int,
        Meta(
            ge=1, le=100, description="Failed scrapes in a row after which an endpoint gets no more requests."
        ),
    ] = 3
    max_page_bytes: Annotated[
        int, Meta(ge=1024, le=2**28, description="A scrape whose page is larger has failed.")
    ] = 4 * 2**20


class Sampling(Strict, frozen=True):
    """For a share of the requests the answer is streamed to the picker too, which learns from it."""

    share: Annotated[
        Ratio, Meta(description="Share of the requests. All other answers never pass through the picker.")
    ] = 0.01
    max_text_bytes: Annotated[
        int,
        Meta(
            ge=0,
            le=2**24,
            description="Bytes of a sampled answer that are kept, to record the prefix of the next turn.",
        ),
    ] = 262_144
