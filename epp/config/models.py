"""The `models` section of the configuration. Part of `epp.config.settings`, which reads the file."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from epp.config.strict import Strict


class Models(Strict, frozen=True):
    """Which models the servers have, as they say themselves at `/v1/models` (docs/models.md)."""

    ask: Annotated[
        bool,
        Meta(
            description="Ask the servers. If false, a model is known by the endpoints file or the annotations of the pods alone."
        ),
    ] = True
    interval_seconds: Annotated[
        float, Meta(ge=5, le=86400, description="Time between two questions to one server.")
    ] = 60.0
    unknown: Annotated[
        Literal["NotFound", "Route"],
        Meta(
            description="What becomes of a request for a model that no server lists. NotFound: the client gets 404, once the list of every "
            "server is known. Route: any server gets it, for servers that load adapters when they are asked for."
        ),
    ] = "NotFound"
    answer_list: Annotated[
        bool,
        Meta(
            description="Answer `GET /v1/models` with the models of all servers. If false, one server answers with its own."
        ),
    ] = True
