"""Makes a second listener of the generated bootstrap, for probes and Prometheus.

Envoy's admin page can stop Envoy and show its certificates, so it stays on loopback. A kubelet and Prometheus
connect from outside the pod. This listener serves only two of the admin pages, read-only. Pure. `bootstrap`
calls this module.
"""

from __future__ import annotations

from typing import Final

from epp.config.settings import Config
from epp.serve.envoy.client_listener import listening, routed, router
from epp.serve.envoy.clusters import static
from epp.serve.envoy.messages import Message, address

_ADMIN: Final = "envoy-admin"
"""Cluster of Envoy's own admin page."""


def listener(config: Config) -> Message:
    """Return the listener at `envoy.status`. Its connections do not count among the clients', and end
    soon.
    """
    pages = [_page(path) for path in ("/ready", "/stats/prometheus")]
    nothing_else = {"match": {"prefix": "/"}, "direct_response": {"status": 404}}
    return listening(
        "status",
        config.envoy.status,
        manager={
            "normalize_path": True,
            "common_http_protocol_options": {"idle_timeout": "30s"},
            "request_headers_timeout": "5s",
            "http_filters": [router()],
            "route_config": routed("status", [*pages, nothing_else]),
        },
        ignore_global_conn_limit=True,
    )


def _page(path: str) -> Message:
    # POST requests to the admin page change Envoy's state.
    only_get = {"name": ":method", "string_match": {"exact": "GET"}}
    return {"match": {"path": path, "headers": [only_get]}, "route": {"cluster": _ADMIN}}


def admin(config: Config) -> Message:
    """Return Envoy's admin page as a cluster of its own."""
    return static(_ADMIN, [address(config.envoy.admin)])
