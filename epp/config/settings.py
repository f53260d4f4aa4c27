"""Reads the configuration of the program, one YAML file, into frozen structs. All defaults of the
configuration are here.

Settings that may change while the picker runs are elsewhere: the policy and the endpoints have files (or
Kubernetes objects) of their own. `cli` and `up` call this module. Every other module gets the struct that
it needs through its constructor.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from msgspec import Meta

from epp.base.errors import ConfigError, usable
from epp.base.types import Address
from epp.config.dialects import DIALECTS, UNKNOWN, Dialect, DialectName
from epp.config.reading import Strict, decode, in_words, rooted
from epp.config.sections import Admin, Envoy, ExactMode, Kubernetes, Listen, consecutive
from epp.config.sharing import Sharing

BLOCKED_PATHS: Final = (
    "/abort_requests",
    "/adapters",
    "/collective_rpc",
    "/docs",
    "/fault_tolerance",
    "/finish_weight_update",
    "/get_world_size",
    "/inference/v1/abort_requests",
    "/init_weight_transfer_engine",
    "/is_paused",
    "/is_scaling_elastic_ep",
    "/is_sleeping",
    "/kv_blocks",
    "/kv_event_sources",
    "/load",
    "/metrics",
    "/openapi.json",
    "/pause",
    "/redoc",
    "/release_kv_cache_memory",
    "/reset_encoder_cache",
    "/reset_mm_cache",
    "/reset_prefix_cache",
    "/resume",
    "/resume_kv_cache_memory",
    "/scale_elastic_ep",
    "/server_info",
    "/shutdown_weight_transfer_engine",
    "/sleep",
    "/start_draft_weight_update",
    "/start_profile",
    "/start_weight_update",
    "/stop_profile",
    "/tokenizer_info",
    "/update_weight_version",
    "/update_weights",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/version",
    "/wake_up",
    "/weight_checker",
    "/weight_info",
)
"""Paths that vLLM serves for its operators, in all of its modes, and pages that describe the server: its API,
its version, its chat template."""


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


class StreamLimits(Strict, frozen=True):
    """A bound for the request bodies that are held, and settings for data planes other than the Envoy of `epp
    envoy-config`.
    """

    max_held_body_bytes: Annotated[int, Meta(ge=2**20, le=2**40)] = 256 * 2**20
    """Largest size of all unfinished request bodies that one worker holds together. A request over the bound
    is routed by load without its body, or gets 429 if the policy has `whenSaturated: Reject`. The same bound
    holds for unfinished messages of the data plane. Beyond the bound the data plane goes on without the
    picker."""
    mode_override: bool = True
    """Ask the data plane to send the body of sampled answers to the picker. This has no effect where the data
    plane does not allow such a request."""


class Log(Strict, frozen=True):
    level: Literal["debug", "info", "warning", "error"] = "info"
    """Messages below this level are not logged."""
    format: Literal["json", "text"] = "json"
    """json: each line is one JSON object. text: lines for people. Both go to standard error."""


class Config(Strict, frozen=True):
    """Configuration of one endpoint picker and its workers."""

    endpoints_file: str = ""
    """YAML file that lists the model servers. The picker reads it again when it changes. Set either this or
    `kubernetes`."""
    policy_file: str = ""
    """File with a PrefixRoutingPolicy. The picker reads it again when it changes. Empty means the default
    policy. With `kubernetes` this policy is used while no policy object applies."""
    kubernetes: Kubernetes | None = None
    models: Models = Models()
    hash_secret_file: str = ""
    """File with a secret of 16 bytes or more, the same for all pickers of a pool. Prompts are hashed with
    this secret, so that no client can make a text whose hash equals that of a cached text. Empty: the secret
    is derived from `sharing.redis.signingKeyFile`. Without a signing key the pickers make a secret at start
    and agree on it over Redis."""
    listen: Listen = Listen()
    workers: Annotated[int, Meta(ge=1, le=64)] = 1
    """Number of worker processes. Each has a socket of its own."""
    dialect: DialectName = "auto"
    """Gateway that calls the picker (docs/protocol.md). This setting decides how many destinations an answer
    names, and whether the picker holds streams (`envoy.failOpen`). auto: if `envoy.edsFile` is set, the
    gateway is the Envoy of `epp envoy-config`; otherwise an answer names one destination, which every gateway
    can read."""
    drain_seconds: Annotated[float, Meta(ge=0, le=86400)] = 30.0
    """Longest time that the picker waits for the streams in flight after SIGTERM."""
    blocked_paths: tuple[Annotated[str, Meta(pattern="^(/[A-Za-z0-9._~-]+)+$")], ...] = BLOCKED_PATHS
    """A request gets 404 if its path begins with one of these, in any spelling. The picker answers so behind
    any gateway. The Envoy of `epp envoy-config` answers so too, also while the picker is away. A list here
    replaces the default list."""
    allowed_paths: tuple[str, ...] = ()
    """Entries of `blockedPaths` that clients may use, such as `/version`. The rest of the default list stays
    in force.
    """
    conformance_headers: bool = False
    """Obey the header `test-epp-endpoint-selection`. Use this only for conformance runs, because clients
    can then choose the endpoint."""
    admin: Admin = Admin()
    envoy: Envoy = Envoy()
    streams: StreamLimits = StreamLimits()
    sharing: Sharing = Sharing()
    exact_mode: ExactMode | None = None
    """Follow the KV events of the servers. Without this section the prefix table stays approximate."""
    tracing: bool = False
    """Send a span for each sampled pick to an OpenTelemetry collector. The environment variables `OTEL_*`
    name the collector and the share of picks to sample (docs/tracing.md). Needs the extra `tracing`."""
    log: Log = Log()

    @property
    def closed_paths(self) -> tuple[str, ...]:
        """Return `blocked_paths` without the paths in `allowed_paths`."""
        return tuple(path for path in self.blocked_paths if path not in self.allowed_paths)

    @property
    def caller(self) -> Dialect:
        """Return the gateway that this picker is set up for. If the picker writes endpoints for Envoy, `auto`
        is the Envoy of `epp envoy-config`.
        """
        own_envoy = DIALECTS["envoy"] if self.envoy.eds_file else UNKNOWN
        return DIALECTS.get(self.dialect, own_envoy)

    @property
    def asks_for_s(self) -> float:
        """Return how much time the picker may ask its gateway for while a request with a buffered body waits.
        0 means that the picker does not ask.
        """
        asked_s = self.envoy.max_message_timeout_seconds
        if asked_s is None:
            return 60.0 if self.caller.timeouts == "extendable" else 0.0
        return asked_s

    @property
    def gives_s(self) -> float:
        """Return how long the gateway waits for the pick of a buffered body if the picker asks for no more
        time. 0 means that this is not known.
        """
        return self.envoy.message_timeout_seconds if self.caller.timeouts == "fixed" else 0.0

    @property
    def holds_streams(self) -> bool:
        """Return whether each ext_proc stream stays open until the answer ends, so that the count of requests
        in flight is exact. A gateway that fails closed would cut these answers if the picker dies.
        """
        return self.envoy.fail_open and not self.caller.fails_closed

    def faults(self) -> Iterator[str]:
        """Yield what types cannot check. Each text begins with the field at fault."""
        kubernetes, envoy = self.kubernetes, self.envoy
        if kubernetes is None and not self.endpoints_file:
            yield "endpointsFile: is missing; name the file that lists the model servers, or set `kubernetes`"
        if kubernetes is not None:
            if self.endpoints_file:
                yield "endpointsFile: `kubernetes` is set too, and endpoints come from only one of them; remove one of the two"
            yield from kubernetes.faults()
        if envoy.eds_file and not self.caller.own_config:
            yield f"dialect: {self.dialect}, but envoy.edsFile is for the Envoy of `epp envoy-config`; remove one of the two"
        for n, path in enumerate(self.allowed_paths):
            if path not in self.blocked_paths:
                yield f"allowedPaths[{n}]: {path} is not in blockedPaths, so clients may use it anyway"
        yield from self.listen.faults(workers=self.workers)
        yield from self._address_faults()
        yield from envoy.faults()
        yield from self.sharing.faults()
        if self.exact_mode is not None:
            yield from self.exact_mode.faults()

    def _address_faults(self) -> Iterator[str]:
        """Check that every process can listen at each of its addresses, and that none is used twice."""
        listeners = {
            "envoy.listen": (self.envoy.listen, 1),
            "envoy.admin": (self.envoy.admin, 1),
            "envoy.status": (self.envoy.status, 1),
            "listen.healthAddress": (self.listen.health_address, 1),
            "listen.address": (self.listen.address, self.workers),
            "admin.address": (self.admin.address, self.workers),
        }
        taken: dict[Address, str] = {}
        for field, (text, count) in listeners.items():
            is_path = field == "listen.address" and text.startswith("unix:")
            if is_path or (not text and field in ("envoy.status", "listen.healthAddress")):
                continue
            try:
                addresses = consecutive(text, count)
            except ValueError as error:
                yield f"{field}: {error}"
                continue
            for address in addresses:
                for other, by in taken.items():
                    hosts = {address.host, other.host}
                    # `::` is every address, and 0.0.0.0 every one of IPv4. Envoy may be on another machine.
                    every = "::" in hosts or ("0.0.0.0" in hosts and ":" not in "".join(hosts))
                    meet = len(hosts) == 1 or (every and "envoy." not in f"{field} {by}")
                    if meet and address.port == other.port:
                        yield f"{field}: {address} is taken by {by}; choose another port"
                taken[address] = field


def _prepared(found: dict[Any, Any]) -> Any:
    """Return the document with addresses in one shape, because both `listen: ADDRESS` and `listen: {address:
    ADDRESS}` may be written.
    """
    made = {
        name: {"address": value} if name in ("listen", "admin") and isinstance(value, str) else value
        for name, value in found.items()
    }
    if isinstance(envoy := made.get("envoy"), dict):
        made["envoy"] = {name: _address_in(name, value) for name, value in envoy.items()}
    return made


def _address_in(name: str, value: Any) -> Any:
    if name not in ("listen", "admin", "status") or not isinstance(value, dict):
        return value
    if [*value] != ["address"]:
        raise ConfigError(
            f'envoy.{name}: has {", ".join(map(str, value)) or "no field"}; write {name}: "0.0.0.0:8080", or {name}: '
            '{address: "0.0.0.0:8080"}'
        )
    return value["address"]


def load_config(path: Path) -> Config:
    """Read and check the configuration. Raise ConfigError, which names the file and the field."""
    with usable(str(path)):
        text = path.read_bytes()
    try:
        found = decode(text, kind=Config | None, prepare=_prepared) or Config()
        config: Config = rooted(found, folder=path.absolute().parent)
        for fault in config.faults():
            raise ConfigError(fault)  # noqa: TRY301 - the next lines say in which file and line
    except (ValueError, ConfigError) as error:
        raise ConfigError(f"{path}: {in_words(error, of=Config, text=text)}") from error
    return config
