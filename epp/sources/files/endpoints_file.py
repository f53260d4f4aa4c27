"""Decodes the YAML file that lists the model servers, checks it, and makes endpoints of it.

    endpoints:
      - name: a
        address: "10.0.0.1:8000"      # or address: 10.0.0.1 and port: 8000; IPv6 as "[fd00::1]:8000"
        model: llama-8b
        adapters: [sql, legal]
        labels: {zone: eu-1}
        kv_events: tcp://10.0.0.1:5557   # for exact mode; if missing, the configuration's addresses count
        kv_replay: tcp://10.0.0.1:5558   # the same for replays
        role: prefill                    # prefill, decode or both (docs/disaggregation.md)
        rank: 1                          # a data parallel rank (docs/disaggregation.md)
        behind: "10.0.0.1:8000"          # where requests for the rank go: the front of its server
        metrics: ":8002/metrics"         # if not at the policy's scrape.path; a port or a path is enough

    rewrites:                          # other names for models, docs/models.md
      - models: [gpt]
        targets: [{model: llama-8b, weight: 90}, {model: llama-8b-next, weight: 10}]

Names and addresses are unique. `endpoints: []` is legal: requests then get 503 until there are some. An empty
file is refused: some editors and scripts empty a file before they write it again. `serve.inputs` calls this
module at start, and `watch` whenever the file changes.
"""

from collections.abc import Sequence
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta

from epp.base.errors import ConfigError
from epp.base.types import METRICS_PLACE, ROLES, Address, Endpoint, EndpointName
from epp.config.reading import decode, in_words
from epp.request.rewriting import BoundedName, Rewrite, Rewrites

_ListedName = Annotated[str, Meta(min_length=1, max_length=253, pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/@-]*$")]
_Zmq = Annotated[str, Meta(max_length=1024, pattern=r"^((tcp|ipc)://.+)?$")]
_Place = Annotated[str, Meta(pattern=f"^{METRICS_PLACE.pattern}$")]
_MOST_ENDPOINTS = 16_384
_NOTHING = "is empty; a file that lists no servers says `endpoints: []`"
_ListedText = Annotated[str, Meta(max_length=1024)]


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: _ListedName
    address: str
    port: Annotated[int, Meta(ge=1, le=65535)] | None = None
    model: _ListedText = ""
    adapters: tuple[BoundedName, ...] = ()
    labels: dict[_ListedText, _ListedText] = {}  # for the user's own tools
    kv_events: _Zmq = ""
    kv_replay: _Zmq = ""
    metrics: _Place = ""
    role: Literal["", "prefill", "decode", "both"] = ""
    rank: Annotated[int, Meta(ge=0, le=65_535)] | None = None
    behind: str = ""


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    endpoints: Annotated[tuple[_Entry, ...], Meta(max_length=_MOST_ENDPOINTS)]
    rewrites: Annotated[tuple[Rewrite, ...], Meta(max_length=1024)] = ()


class Listed(NamedTuple):
    """The content of the file."""

    endpoints: Sequence[Endpoint]
    rewrites: Rewrites


def load_endpoints(text: str | bytes, *, source: str) -> Listed:
    """Decode and check the file. Raise ConfigError, which names `source` and the field at fault."""
    try:
        file: _File = decode(text, kind=_File)
        endpoints = [_endpoint(entry, field=f"endpoints[{n}]") for n, entry in enumerate(file.endpoints)]
        _check_unique("name", [e.name for e in endpoints])
        _check_unique("address", [str(e.address) for e in endpoints])
    except (ValueError, ConfigError) as error:
        words = in_words(error, of=_File, text=text)
        raise ConfigError(f"{source}: {_NOTHING if words.startswith('is empty') else words}") from error
    return Listed(endpoints, Rewrites(file.rewrites))


def _endpoint(entry: _Entry, *, field: str) -> Endpoint:
    if entry.kv_replay and not entry.kv_events:
        raise ConfigError(
            f"{field}.kv_replay: needs kv_events; add kv_events, or leave both to the configuration"
        )
    if entry.behind and entry.rank is None:
        raise ConfigError(
            f"{field}.behind: is the address for the requests of a rank; add rank, or leave behind out"
        )
    return Endpoint(
        name=EndpointName(entry.name),
        address=_address(entry, field=field),
        model=entry.model,
        adapters=frozenset(entry.adapters),
        kv_events=entry.kv_events,
        kv_replay=entry.kv_replay,
        metrics=entry.metrics,
        role=ROLES[entry.role],
        rank=entry.rank,
        behind=_parsed(entry.behind, field=f"{field}.behind") if entry.behind else None,
    )


def _address(entry: _Entry, *, field: str) -> Address:
    """Return an address from `ip:port`, or from an address alone beside a `port`. Host names are refused,
    because Envoy's endpoints file holds addresses.
    """
    text = entry.address.strip()
    if "://" in text:
        raise ConfigError(
            f"{field}.address: {text!r} is a URL; write ip:port. The gateway reaches model servers without TLS"
        )
    if entry.port is not None:
        bare_ipv6 = text.count(":") > 1 and not text.startswith("[")
        text = f"[{text}]:{entry.port}" if bare_ipv6 else f"{text}:{entry.port}"
    return _parsed(text, field=f"{field}.address")


def _parsed(text: str, *, field: str) -> Address:
    try:
        return Address.parse(text)
    except ValueError as error:
        raise ConfigError(f"{field}: {error}") from error


def _check_unique(field: str, values: Sequence[str]) -> None:
    first_at: dict[str, int] = {}
    for n, value in enumerate(values):
        if value in first_at:
            raise ConfigError(
                f"endpoints[{n}].{field}: {value} is already the {field} of endpoints[{first_at[value]}]"
            )
        first_at[value] = n
