"""The complete Envoy bootstrap for one configuration, built from typed messages.

Pure: the same configuration gives the same text, keys sorted.
Called by the command line, off the request path: the message classes take about a second to import.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Literal

import yaml
from betterproto2 import Casing
from envoy_data_plane.envoy.config.bootstrap.v3 import Admin, Bootstrap, BootstrapStaticResources
from envoy_data_plane.envoy.config.core.v3 import Node

from epp.envoy import clusters, listener, overload, probe_listener, tracing
from epp.envoy.names import STAT_PREFIX
from epp.errors import ConfigError

if TYPE_CHECKING:
    from epp.config.settings import Config


def bootstrap(config: Config, *, output: Literal["yaml", "json"] = "yaml") -> str:
    """The bootstrap as text for `envoy --config-path`. ConfigError if the configuration lacks something."""
    # Snake case, as Envoy's own documentation writes the fields.
    document = _with_extra_filters(message(config).to_dict(casing=Casing.SNAKE), config)
    if output == "json":
        return json.dumps(document, indent=2, sort_keys=True) + "\n"
    return yaml.safe_dump(document, sort_keys=True, width=110)


def _with_extra_filters(document: dict[str, Any], config: Config) -> dict[str, Any]:
    """Put the operator's HTTP filters before ours. Their types may be unknown, so they stay JSON."""
    extra: list[Any] = list(config.envoy.extra_http_filters)
    if extra:
        chain = document["static_resources"]["listeners"][0]["filter_chains"][0]
        manager = chain["filters"][0]["typed_config"]
        manager["http_filters"] = [*extra, *manager["http_filters"]]
        for upgrade in manager["upgrade_configs"]:
            upgrade["filters"] = [*extra, *upgrade["filters"]]
    return document


def message(config: Config) -> Bootstrap:
    """The bootstrap as a typed message."""
    if not config.envoy.eds_file:
        raise ConfigError(
            "envoy.edsFile: is missing, and Envoy learns the endpoints from this file; name a file that the "
            "picker may write"
        )
    watched = bool(config.envoy.status)
    return Bootstrap(
        node=Node(id=STAT_PREFIX, cluster=STAT_PREFIX),
        # Probes and operators can still connect when clients have taken every connection.
        admin=Admin(address=clusters.envoy_address(config.envoy.admin), ignore_global_conn_limit=True),
        overload_manager=overload.manager(config.envoy),
        static_resources=BootstrapStaticResources(
            listeners=[listener.gateway(config), *([probe_listener.listener(config)] if watched else [])],
            clusters=[
                clusters.model_servers(config),
                clusters.picker(config),
                *([probe_listener.admin(config)] if watched else []),
                *([tracing.collector(config.envoy.tracing)] if config.envoy.tracing else []),
            ],
        ),
    )
