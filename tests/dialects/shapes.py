"""The behaviour of each gateway, taken from its source: Envoy's configuration for gateways that are Envoys,
and what clients of each gateway see.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from tests.harness.data_plane import DESTINATION, LB
from tests.harness.envoy import cluster, connection_manager

EXT_PROC: Final = "envoy.filters.http.ext_proc"
SUBSET_HINT: Final = "envoy.lb.subset_hint"
SUBSET_HEADER: Final = "x-test-subset"
Edit = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, slots=True)
class Shape:
    """One line of the table."""

    name: str
    """The name of the dialect."""
    edit: Edit | None = None
    """Changes our own Envoy's configuration to that of the gateway. None: the gateway is no Envoy, and
    `scripted` plays the gateway.
    """
    reads_list: bool = True
    duplex: bool = False
    """Bodies pass the picker both ways, and the gateway fails closed."""
    subset: bool = False
    """The gateway tells the picker from which endpoints it may choose."""
    names_served: bool = False
    bare: bool = False
    """The gateway tells the picker no path, and takes only the destination from its answer: no refusal,
    header or body.
    """
    abort_is: str = "ended"
    """The outcome of a request whose client leaves in the middle of the answer."""

    @property
    def shows_refusals(self) -> bool:
        """A client sees the picker's refusals."""
        return not self.bare


def _filter(document: dict[str, Any]) -> dict[str, Any]:
    filters = connection_manager(document)["http_filters"]
    found: dict[str, Any] = next(each for each in filters if each["name"] == EXT_PROC)["typed_config"]
    return found


DUPLEX: Final[Mapping[str, str]] = {
    "request_header_mode": "SEND",
    "request_body_mode": "FULL_DUPLEX_STREAMED",
    "request_trailer_mode": "SEND",
    "response_header_mode": "SEND",
    "response_body_mode": "FULL_DUPLEX_STREAMED",
    "response_trailer_mode": "SEND",
}


def _full_duplex(document: dict[str, Any]) -> None:
    chosen = _filter(document)
    chosen["processing_mode"] = dict(DUPLEX)
    chosen["failure_mode_allow"] = False
    chosen.pop("response_attributes", None)


def _by_header(document: dict[str, Any]) -> None:
    """Read the pick from the request's header instead of the metadata."""
    (policy,) = cluster(document, "model-servers")["load_balancing_policy"]["policies"]
    policy["typed_extension_config"]["typed_config"]["override_host_sources"] = [{"header": DESTINATION}]


def _subset(document: dict[str, Any]) -> None:
    """Add a filter before the picker that turns a header into the subset hint."""
    value = {"metadata_namespace": SUBSET_HINT, "key": f"{DESTINATION}-subset", "type": "STRING"}
    hint = {
        "@type": "type.googleapis.com/envoy.extensions.filters.http.header_to_metadata.v3.Config",
        "request_rules": [{"header": SUBSET_HEADER, "on_header_present": value, "remove": True}],
    }
    connection_manager(document)["http_filters"].insert(
        0, {"name": "envoy.filters.http.header_to_metadata", "typed_config": hint}
    )


def _own(document: dict[str, Any]) -> None:
    _subset(document)


def _envoy_gateway(document: dict[str, Any]) -> None:
    _by_header(document)
    _subset(document)


def _istio(document: dict[str, Any]) -> None:
    """Use the configuration that istiod writes (its filters.go, route.go and cluster_builder.go). The filter
    asks for nothing, the route of an InferencePool switches it on, and the policy that reads the pick notes
    which server took the request. The pool says FailClose, the API's default, because with FailOpen Envoy
    lets some requests pass without a picker.
    """
    chosen = _filter(document)
    caller = chosen["grpc_service"]
    chosen.clear()
    lb = {"untyped": [LB]}
    chosen.update(
        {
            "@type": "type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExternalProcessor",
            "grpc_service": caller,
            "failure_mode_allow": True,
            "processing_mode": {"request_header_mode": "SKIP", "response_header_mode": "SKIP"},
            "message_timeout": "1000s",
            "metadata_options": {"receiving_namespaces": lb, "forwarding_namespaces": lb},
        }
    )
    (host,) = connection_manager(document)["route_config"]["virtual_hosts"]
    overrides = {"failure_mode_allow": False, "grpc_service": caller, "processing_mode": dict(DUPLEX)}
    host["routes"][-1]["typed_per_filter_config"] = {
        EXT_PROC: {
            "@type": "type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExtProcPerRoute",
            "overrides": overrides,
        }
    }
    (policy,) = cluster(document, "model-servers")["load_balancing_policy"]["policies"]
    served = {"key": LB, "path": [{"key": f"{DESTINATION}-served"}]}
    policy["typed_extension_config"]["typed_config"]["selected_host_key"] = served


def _ai_gateway(document: dict[str, Any]) -> None:
    """The header holds one address. Envoy connects to every address that is there."""
    _full_duplex(document)
    chosen = _filter(document)
    chosen.pop("metadata_options")
    chosen.pop("allow_mode_override")
    chosen["message_timeout"] = "300s"
    chosen.pop("max_message_timeout", None)
    servers = cluster(document, "model-servers")
    for name in ("eds_cluster_config", "load_balancing_policy"):
        servers.pop(name)
    servers.update(
        type="ORIGINAL_DST",
        lb_policy="CLUSTER_PROVIDED",
        original_dst_lb_config={"use_http_header": True, "http_header_name": DESTINATION},
    )


def _gke(document: dict[str, Any]) -> None:
    _full_duplex(document)
    _by_header(document)
    _subset(document)
    _filter(document)["response_attributes"] = ["upstream.address"]


SHAPES: Final[Mapping[str, Shape]] = {
    shape.name: shape
    for shape in (
        Shape("envoy", _own, subset=True, names_served=True),
        Shape("envoy-gateway", _envoy_gateway, subset=True, names_served=True),
        Shape("istio", _istio, duplex=True, names_served=True),
        Shape("ai-gateway", _ai_gateway, reads_list=False, duplex=True),
        Shape("agentgateway", reads_list=False, duplex=True, names_served=True),
        Shape("nginx", reads_list=False, bare=True, abort_is="detached"),
        Shape("gke", _gke, duplex=True, subset=True, names_served=True),
    )
}
