"""Makes the clusters of the generated bootstrap: the model servers, the picker's workers, and clusters whose
addresses never change.

Pure. Settings whose default would fail unnoticed are set here,
each with a comment that says why. `bootstrap` calls this module.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from epp.config.settings import Config
from epp.serve.envoy import tls
from epp.serve.envoy.messages import Message, absolute, address, directory_of, extension, typed
from epp.serve.envoy.names import DESTINATION, LB_NAMESPACE, MODEL_SERVERS, PICKER, PICKER_SERVICE


def model_servers(config: Config) -> Message:
    """Return the model servers. Envoy reads them from the endpoints file, and the picker chooses among
    them.
    """
    eds_file = absolute(config.envoy.eds_file)
    file = {"path": eds_file, "watched_directory": directory_of(eds_file)}
    return {
        "name": MODEL_SERVERS,
        "type": "EDS",
        "eds_cluster_config": {"eds_config": {"path_config_source": file}},
        # The default is 5 s. If a server has vanished from the network, each request would wait 5 s before
        # the next server is tried.
        "connect_timeout": "1s",
        "load_balancing_policy": _follow_the_pick(),
        "circuit_breakers": _wide_breakers(),
        "upstream_connection_options": {
            # This finds a machine that died before its answer began, because no time-out bounds such an
            # answer.
            "tcp_keepalive": {"keepalive_probes": 3, "keepalive_time": 30, "keepalive_interval": 5}
        },
        **_speaking(
            "http_protocol_options",
            # This is less than the 5 s after which vLLM's server closes an idle connection. A request sent at
            # the moment of closing would be lost.
            common_http_protocol_options={"idle_timeout": "3s"},
        ),
    }


def picker(config: Config) -> Message:
    """Return the cluster of the picker's workers. Each worker is an endpoint."""
    return static(
        PICKER,
        map(address, config.listen.addresses(workers=config.workers)),
        health_checks=[_grpc_health_check()],
        common_lb_config={
            # By default, once half the workers are down Envoy sends to the dead ones again ("panic").
            "healthy_panic_threshold": {"value": 0},
            # By default a second change of health within a second waits for the end of that second.
            "update_merge_window": "0s",
        },
        circuit_breakers=_wide_breakers(),
        **tls.upstream(config),
        **speaking_http2(),
    )


def static(name: str, addresses: Iterable[Message], **settings: Any) -> Message:
    """Return a cluster of fixed addresses. `settings` are the other fields of the message."""
    endpoints = [{"endpoint": {"address": each}} for each in addresses]
    return {
        "name": name,
        "type": "STATIC",
        "connect_timeout": "1s",
        "load_assignment": {"cluster_name": name, "endpoints": [{"lb_endpoints": endpoints}]},
        **settings,
    }


def speaking_http2() -> Message:
    return _speaking("http2_protocol_options")


def _speaking(protocol: str, **settings: Any) -> Message:
    kind = "extensions.upstreams.http.v3.HttpProtocolOptions"
    options = typed(kind, explicit_http_config={protocol: {}}, **settings)
    return {"typed_extension_protocol_options": {f"envoy.{kind}": options}}


def _follow_the_pick() -> Message:
    """Try the picker's list of addresses in order, one address for each attempt. Without a list, or after its
    end, Envoy goes round robin.

    The list comes only from the metadata, because a client could send a header. An address that Envoy does
    not know is skipped.
    """
    source = {"metadata": {"key": LB_NAMESPACE, "path": [{"key": DESTINATION}]}}
    fallback = _policy("round_robin", "RoundRobin")
    return _policy("override_host", "OverrideHost", override_host_sources=[source], fallback_policy=fallback)


def _policy(name: str, kind: str, **settings: Any) -> Message:
    name = f"load_balancing_policies.{name}"
    return {
        "policies": [{"typed_extension_config": extension(name, f"extensions.{name}.v3.{kind}", **settings)}]
    }


def _wide_breakers() -> Message:
    """Return limits so large that they never act, since admission is the picker's work.

    The defaults are 1,024 of each and 3 retries. Every request holds a stream at the picker until its answer
    ends, so beyond 1,024 requests the others would bypass the picker without an error. If the first choice of
    a burst dies, all but 3 requests would fail.
    """
    wide = dict.fromkeys(("max_connections", "max_pending_requests", "max_requests"), 100_000)
    return {"thresholds": [{**wide, "max_retries": 1_000}]}


def _grpc_health_check() -> Message:
    """Take a dead or hung worker out, and let it back at once.

    Until then its share of the requests bypasses the picker. A TCP check would not notice a hung worker. A
    killed worker is out after at most 1.2 s, a hung one after about 3 s.
    """
    return {
        "timeout": "1s",
        "interval": "1s",
        # Until the first request, the default is to check once a minute.
        "no_traffic_interval": "1s",
        "no_traffic_healthy_interval": "1s",
        # One slow answer proves nothing, so a second check follows the first failure at once.
        "unhealthy_threshold": 2,
        "unhealthy_edge_interval": "0.2s",
        "unhealthy_interval": "1s",
        "healthy_threshold": 1,
        "grpc_health_check": {"service_name": PICKER_SERVICE},
    }
