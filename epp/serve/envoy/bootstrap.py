"""Makes the complete Envoy bootstrap for one configuration. Pure: the same configuration gives the same text,
with sorted keys. The command line calls this module.
"""

from __future__ import annotations

import json
from typing import Literal

import yaml

from epp.base.errors import ConfigError
from epp.config.settings import Config
from epp.serve.envoy import client_listener, clusters, overload_manager, probe_listener, tracing
from epp.serve.envoy.messages import Message, address
from epp.serve.envoy.names import STAT_PREFIX


def bootstrap(config: Config, *, output: Literal["yaml", "json"] = "yaml") -> str:
    """Return the bootstrap as text for `envoy --config-path`. Raise ConfigError if the configuration lacks
    something.
    """
    if not config.envoy.eds_file:
        raise ConfigError(
            "envoy.edsFile: is missing, and Envoy learns the endpoints from this file; name a file that the "
            "picker may write"
        )
    if output == "json":
        return json.dumps(_message(config), indent=2, sort_keys=True) + "\n"
    return yaml.safe_dump(_message(config), sort_keys=True, width=110)


def _message(config: Config) -> Message:
    envoy = config.envoy
    return {
        "node": {"id": STAT_PREFIX, "cluster": STAT_PREFIX},
        # Probes and operators can still connect when clients have taken every connection.
        "admin": {"address": address(envoy.admin), "ignore_global_conn_limit": True},
        "overload_manager": overload_manager.manager(envoy),
        "static_resources": {
            "listeners": [
                client_listener.gateway(config),
                *([probe_listener.listener(config)] if envoy.status else []),
            ],
            "clusters": [
                clusters.model_servers(config),
                clusters.picker(config),
                *([probe_listener.admin(config)] if envoy.status else []),
                *([tracing.collector(envoy.tracing)] if envoy.tracing else []),
            ],
        },
    }
