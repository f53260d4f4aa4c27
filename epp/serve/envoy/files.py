"""Writes the files of Envoy: its bootstrap, the endpoints (EDS), and where its certificates are (SDS).

The bootstrap is `bootstrap.yaml`, filled in for one configuration. That file says why each setting is there.
The same configuration gives the same text, with sorted keys. The tests parse every kind of bootstrap
strictly, by Envoy's protobuf definitions, and start the real Envoy with it.

Envoy follows the other files. A reader sees the old text or the new one, never a part. `epp envoy-config` and
the picker write them first, since Envoy does not start without them, and the picker writes the endpoints at
each change. The endpoints file does not contain their health: Envoy must know every endpoint that may still
be picked, and only the picker judges health.

Envoy reads certificates that the bootstrap names only once, at its start. After a renewal it would no longer
trust the picker, and every request would bypass the picker unnoticed. If a file names the certificates, Envoy
follows their changes. These files hold only names, no keys.
"""

import copy
import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePath
from typing import Any, Final, Literal

import msgspec
import xxhash
import yaml

from epp.base.errors import (
    DETAILS_PREFIX,
    BlockedPathError,
    BodyTooLargeError,
    ConfigError,
    PickError,
    SaturatedError,
)
from epp.base.types import SERVER_HEADERS, Address, Endpoint
from epp.config.sections import Tls
from epp.config.settings import Config

EnvoyMessage = dict[str, Any]
"""A message of Envoy, with the names of the fields as in Envoy's own documentation."""

MODEL_SERVERS: Final = "model-servers"
"""Cluster of the model servers, as in `bootstrap.yaml`."""


def typed(kind: str, **fields: Any) -> EnvoyMessage:
    """Return a message that names its type."""
    return {"@type": f"type.googleapis.com/{kind}", **fields}


def write_if_changed(path: Path, text: bytes) -> None:
    """Make the file contain `text`, also if another program has changed it. Raises OSError."""
    try:
        if path.read_bytes() == text:
            return
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
    # The new file is in the same directory, because a rename across file systems copies, and Envoy could read
    # a half copy.
    try:
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(descriptor, "wb") as file:
                os.fchmod(file.fileno(), 0o644)  # Envoy may run as another user
                file.write(text)
            Path(temporary).replace(path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:  # it names the temporary file, or none
        raise OSError(error.errno, error.strerror, str(path)) from error


def render_endpoints(endpoints: Iterable[Endpoint]) -> bytes:
    """Return a discovery response in JSON, with each address once. Equal endpoints give equal bytes. It has
    only endpoints that may be destinations.
    """
    answering = {endpoint.destination for endpoint in endpoints if endpoint.role.answers}
    hosts = sorted((a.host, a.port) for a in answering)
    addresses = [{"socket_address": {"address": host, "port_value": port}} for host, port in hosts]
    resource = typed(
        "envoy.config.endpoint.v3.ClusterLoadAssignment",
        cluster_name=MODEL_SERVERS,
        endpoints=[{"lb_endpoints": [{"endpoint": {"address": each}} for each in addresses]}],
    )
    # `json` would hold the event loop for 15 ms of every change among 1,000 endpoints.
    version = xxhash.xxh3_64_hexdigest(msgspec.json.encode(resource))
    text = msgspec.json.encode({"version_info": version, "resources": [resource]})
    return msgspec.json.format(text, indent=1) + b"\n"


def secret_path(config: Config, name: str) -> str:
    """Return the path of the file that names a certificate."""
    return str(PurePath(config.envoy.eds_file).with_suffix(f".{name}.json"))


def secret_references(config: Config) -> dict[str, EnvoyMessage | None]:
    """Return how the bootstrap names each certificate. None: the configuration has no such certificate."""
    return {
        name: {"name": name, "sds_config": {"path_config_source": {"path": secret_path(config, name)}}}
        if secret
        else None
        for name, secret in _secrets(config).items()
    }


def write_first(config: Config) -> None:
    """Write the files that the bootstrap names. An endpoints file that exists stays. Raises OSError."""
    for name, secret in _secrets(config).items():
        if secret:
            resource = typed("envoy.extensions.transport_sockets.tls.v3.Secret", name=name, **secret)
            text = json.dumps({"resources": [resource]}, indent=1)
            write_if_changed(Path(secret_path(config, name)), text.encode() + b"\n")
    if not (endpoints := Path(config.envoy.eds_file)).exists():
        write_if_changed(endpoints, render_endpoints(()))


def directory_of(path: str) -> EnvoyMessage:
    """Return the directory of an absolute path. Envoy watches a directory and not a file, because both a
    rename and the links of a secret in Kubernetes replace a whole file, and only the directory shows this.
    """
    return {"path": str(PurePath(path).parent)}


def _secrets(config: Config) -> dict[str, EnvoyMessage | None]:
    """Return what the file of each certificate says, by the name that the template asks for."""
    clients, picker = config.envoy.tls, config.listen.tls
    return {
        # What the gateway shows its clients, and the CA that signed their certificates.
        "gateway-identity": _identity(clients) if clients else None,
        "client-trust": _trust(clients.client_ca_file) if clients and clients.client_ca_file else None,
        # The CA of the picker's certificate, or else that certificate, and what Envoy shows the picker.
        "picker-trust": _trust(picker.ca_file or picker.cert_file) if picker else None,
        "picker-client": _identity(picker) if picker and picker.client_ca_file else None,
    }


def _identity(tls: Tls) -> EnvoyMessage:
    return {
        "tls_certificate": {
            "certificate_chain": {"filename": tls.cert_file},
            "private_key": {"filename": tls.key_file},
            "watched_directory": directory_of(tls.cert_file),
        }
    }


def _trust(ca_file: str) -> EnvoyMessage:
    folder = directory_of(ca_file)
    return {"validation_context": {"trusted_ca": {"filename": ca_file}, "watched_directory": folder}}


# -- the bootstrap -----------------------------------------------------------------------------------------

_TEMPLATE: Final = Path(__file__).with_name("bootstrap.yaml")

_INVALID: Final = "invalid_request_error"
_AWAY: Final = "service_unavailable"
_ERRORS: Final = {
    400: (_INVALID, "malformed_request", "the request is not valid HTTP"),
    401: (_INVALID, "not_authenticated", "send valid credentials with the request"),
    403: (_INVALID, "not_allowed", "this gateway does not allow the request"),
    404: (BlockedPathError.error_type, BlockedPathError.reason, "not served by this gateway"),
    408: (_INVALID, "request_timeout", "the request was not complete in time; send it again"),
    413: (BodyTooLargeError.error_type, BodyTooLargeError.reason, "the request body is too large; send a shorter one"),
    429: (SaturatedError.error_type, "rate_limited", "too many requests; try again later"),
    431: (_INVALID, "headers_too_large", "the request has too many header fields, or too large ones; send fewer"),
    501: (_INVALID, "transfer_encoding", "the gateway accepts no transfer encoding except chunked"),
    503: (_AWAY, "unavailable", "no model server could take the request; try again later"),
    504: (_AWAY, "timeout", "the gateway had no answer in time; try again later"),
}  # fmt: skip
"""The errors that Envoy makes itself: status to `type`, `code` and `message`."""

_OVERFLOW: Final = "header_mutation_result_exceeds_limit"
"""Details of the 503 that a request gets if it has no room for the header fields that the gateway adds."""


class _TypedLoader(yaml.CSafeLoader):
    """Reads a mapping with the tag `!TYPE` as a message of this type."""

    def construct_typed(self, kind: str, node: yaml.MappingNode) -> EnvoyMessage:
        fields: dict[Any, Any] = self.construct_mapping(node, deep=True)
        return typed(kind, **fields)


_TypedLoader.add_multi_constructor("!", _TypedLoader.construct_typed)


def bootstrap(config: Config) -> str:
    """Return the bootstrap as text for `envoy --config-path`. Raise ConfigError if the configuration lacks
    something.
    """
    if not config.envoy.eds_file:
        raise ConfigError(
            "envoy.edsFile: is missing, and Envoy learns the endpoints from this file; name a file that the "
            "picker may write"
        )
    message = _filled(yaml.load(_TEMPLATE.read_bytes(), Loader=_TypedLoader), _values(config))  # noqa: S506 - a safe loader
    return yaml.safe_dump(message, sort_keys=True, width=110)


def _values(config: Config) -> dict[str, Any]:
    """Return the value of each name in the template: the fields of `config.envoy`, and what follows from
    other settings. None: it is not set.
    """
    envoy, picker, traced = config.envoy, config.listen, config.envoy.tracing
    secrets = secret_references(config)
    return {
        **msgspec.structs.asdict(envoy),
        **secrets,
        "admin": _address(envoy.admin),
        "all_but_websocket": _all_but("websocket"),
        # Envoy cannot compile one expression for all paths.
        "blocked_paths": [
            {
                "match": {"prefix": path, "case_sensitive": False},
                "direct_response": {"status": BlockedPathError.status},
            }
            for path in config.closed_paths
        ],
        "collector": _socket_address(*traced.address) if traced else None,
        "eds_folder": directory_of(envoy.eds_file),
        "error_replies": _error_replies(),
        "extra_http_filters": list(envoy.extra_http_filters),
        "header_timeout": _seconds(envoy.header_timeout_seconds),
        "listen": _address(envoy.listen),
        "max_heap_bytes": envoy.max_heap_bytes or 2**62,  # no memory has this size
        "max_message_timeout": _seconds(config.asks_for_s),
        "message_timeout": _seconds(envoy.message_timeout_seconds),
        "request_timeout": _seconds(envoy.request_timeout_seconds),
        "require_client_certificate": secrets["client-trust"] is not None or None,
        "sampled_of_a_million": round(traced.sample_percent * 10_000) if traced else None,
        "server_headers": [{"remove": header} for header in SERVER_HEADERS],
        "service_name": traced.service_name if traced else None,
        "status": _address(envoy.status) if envoy.status else None,
        "stream_idle_timeout": _seconds(envoy.stream_idle_timeout_seconds),
        "workers": [
            {"endpoint": {"address": _address(each)}} for each in picker.addresses(workers=config.workers)
        ],
    }


def _filled(node: Any, values: Mapping[str, Any]) -> Any:
    """Return a part of the template with its values. None: it is left out."""
    if isinstance(node, str) and node.startswith("$"):
        # A copy, because a dictionary that occurs twice becomes an anchor and an alias in YAML.
        return copy.deepcopy(values[node[1:]])
    if isinstance(node, list):
        filled: list[Any] = []
        for value in (_filled(each, values) for each in node):
            filled += value if isinstance(value, list) else [] if value is None else [value]
        return filled or None
    if isinstance(node, dict):
        if "$if" in node and not values[node["$if"]]:
            return None
        found = {name: _filled(each, values) for name, each in node.items() if name != "$if"}
        return {name: value for name, value in found.items() if value is not None}
    return node


def _error_replies() -> list[EnvoyMessage]:
    """Return how Envoy writes its own errors: as JSON that the clients of OpenAI's and of Anthropic's API
    parse. The first whose filter matches decides. The picker's own answers pass unchanged, because their
    details begin with `DETAILS_PREFIX`. A status that is not in the table gets a general text.
    """
    other = (PickError.error_type, PickError.reason, "the gateway could not answer")
    overflow = {"filter": _details(f"response.code_details == '{_OVERFLOW}'"), "status_code": 431}
    mark = {"headers_to_add": [{"header": {"key": "connection", "value": "close"}}]}
    return [
        {"filter": _details(f"response.code_details.startsWith('{DETAILS_PREFIX}')")},
        {**overflow, **_body(*_ERRORS[431])},
        *(
            {"filter": _status(status, "EQ"), **_body(*error), **(mark if status == 400 else {})}
            for status, error in _ERRORS.items()
        ),
        {"filter": _status(400, "GE"), **_body(*other)},
    ]


def _details(expression: str) -> EnvoyMessage:
    kind = "envoy.extensions.access_loggers.filters.cel.v3.ExpressionFilter"
    config = typed(kind, expression=expression)
    return {
        "extension_filter": {"name": "envoy.access_loggers.extension_filters.cel", "typed_config": config}
    }


def _status(status: int, comparison: Literal["EQ", "GE"]) -> EnvoyMessage:
    # Envoy requires the name of a runtime setting that could change the number. The setting stays unset.
    value = {"default_value": status, "runtime_key": f"gateway.error_{status}"}
    return {"status_code_filter": {"comparison": {"op": comparison, "value": value}}}


def _body(error_type: str, code: str, message: str) -> EnvoyMessage:
    error = {"message": message, "type": error_type, "param": None, "code": code}
    # The extra `type`, which OpenAI's clients ignore, lets Anthropic's clients read it too.
    body = {"json_format": {"type": "error", "error": error}, "content_type": "application/json"}
    return {"body_format_override": body}


def _all_but(word: str) -> str:
    """Return a regular expression for every text but `word`, in any case. RE2 has no negative look-ahead."""
    letters = [f"[{letter}{letter.upper()}]" for letter in word]
    parts = [f"{''.join(letters[:n])}([^{letters[n][1:-1]}].*)?" for n in range(len(word))]
    return "|".join([*parts, f"{''.join(letters)}.+"])


def _seconds(number: float) -> str:
    return f"{number:.6f}".rstrip("0").rstrip(".") + "s"


def _address(text: str) -> EnvoyMessage:
    """Return an address from `ip:port` or `unix:/path`."""
    if text.startswith("unix:"):
        return {"pipe": {"path": text.removeprefix("unix:")}}
    parsed = Address.parse(text)
    return _socket_address(parsed.host, parsed.port)


def _socket_address(host: str, port: int) -> EnvoyMessage:
    both_families = {"ipv4_compat": True} if host == "::" else {}
    return {"socket_address": {"address": host, "port_value": port, **both_families}}
