"""Defines the `models` section of the configuration, which `epp.config.settings` reads."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from epp.config.strict import Strict


class Models(Strict, frozen=True):
    """Learn from the servers' answers at `/v1/models` which models they have (docs/models.md)."""

    ask: bool = True
    """Ask each server at `/v1/models` which models it has. If false, the picker knows models only from the
    endpoints file or from annotations of the pods."""
    interval_seconds: Annotated[float, Meta(ge=5, le=86400)] = 60.0
    """Time between two such questions to one server."""
    api_key_file: str = ""
    """File with the API key of the model servers (vLLM's `--api-key`). The picker sends the key with these
    questions and with probes. It reads the file each time, so a renewed key is used. Empty means no key."""
    unknown: Literal["NotFound", "Route"] = "NotFound"
    """What to do with a request for a model that no server lists. NotFound: answer 404, once the list of
    every server is known. Route: send the request to any server; this is for servers that load an adapter
    when a request asks for it."""
    answer_list: bool = True
    """Answer `GET /v1/models` with the models of all servers. If false, the request goes to one server, which
    answers with its own models."""
