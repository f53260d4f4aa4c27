"""The shared value types of the picker's packages.

Everything here is immutable and imports no other module. Values that are made for every request are msgspec
structs, because creating one takes a tenth of the time of a frozen dataclass. Units are in the names. Times
are monotonic seconds.
"""

from __future__ import annotations

import enum
import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NewType

from msgspec import Struct

RANK_ADDRESS: Final = "x-data-parallel-host-port"
"""The request header by which the front of a server learns which of its ranks gets the request,
by address."""
RANK: Final = "x-data-parallel-rank"
"""The same by number, as vLLM and SGLang read it."""
PREFILLER: Final = "x-prefiller-host-port"
"""The request header by which an answering server learns who computes the prompt,
as llm-d's sidecar reads it."""
SERVER_HEADERS: Final = (
    PREFILLER,
    "x-llm-d-prefiller-host-port",
    "x-prefiller-url",  # llm-d's sidecar reads it where the newer one is missing
    RANK_ADDRESS,
    RANK,
    "x-encoder-hosts-ports",
    "x-llm-d-encoder-hosts-ports",
    "x-kv-cache-source-host-port",
    "x-llm-d-kv-cache-source-host-port",
)
"""Request headers that servers and their sidecars obey.
A client's are removed: they would make a server call an address of its choice."""

METRICS_PLACE: Final = re.compile(r"(:[1-9][0-9]{0,4})?(/[A-Za-z0-9._~/-]{0,255})?")
"""A place on the server itself: another port, another path, or both."""

ChunkHash = NewType("ChunkHash", int)
"""xxh3_64 of a chunk, seeded with the hash of the chunk before it:
it names the whole prefix up to its end."""

EndpointName = NewType("EndpointName", str)
"""One serving port of one model server, unique in the pool: `pod` or `pod:port`."""


@dataclass(frozen=True, slots=True)
class Address:
    """An IP address and port, written `10.0.0.1:8000` or `[fd00::1]:8000`."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @classmethod
    def parse(cls, text: str) -> Address:
        """Read `ip:port`, IPv6 in brackets. ValueError on anything else, host names included."""
        host, _, port = text.strip().rpartition(":")
        if len(port) > 5 or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
            raise ValueError(f"{text!r} is not ip:port (the port is missing or out of range)")
        bracketed = host.startswith("[") and host.endswith("]")
        try:
            ip = ipaddress.ip_address(host[1:-1] if bracketed else host)
        except ValueError:
            raise ValueError(
                f"{text!r} is not ip:port (no host names; an IPv6 address goes in brackets)"
            ) from None
        if bracketed != (ip.version == 6):
            raise ValueError(f"{text!r} is not ip:port (an IPv6 address goes in brackets)")
        return cls(host=str(ip), port=int(port))


class Role(enum.StrEnum):
    """What an endpoint does where prefill and decode are on different servers (P/D)."""

    UNSAID = ""
    """Its source names no role: it answers requests, and computes only their prompts."""
    PREFILL = "prefill"
    """It computes prompts for others, and is never a destination."""
    DECODE = "decode"
    """As where nothing is said."""
    BOTH = "both"
    """It answers requests, and computes prompts for others too."""
    ENCODE = "encode"
    """It encodes media for others: neither of the two."""

    @property
    def answers(self) -> bool:
        """Requests may be sent there."""
        return self not in (Role.PREFILL, Role.ENCODE)

    @property
    def prefills(self) -> bool:
        """It may be asked for prompts whose answers come from elsewhere."""
        return self in (Role.PREFILL, Role.BOTH)


ROLES: Final[Mapping[str, Role]] = {
    **{role.value: role for role in Role},
    "prefill-decode": Role.BOTH,
    "encode-prefill": Role.PREFILL,
    "encode-prefill-decode": Role.BOTH,
}
"""By the word for it: ours, and those of llm-d's label."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A model server as its source (file, Kubernetes) describes it."""

    name: EndpointName
    address: Address
    model: str = ""
    """The base model it serves; empty when the source does not say."""
    pool: str = ""
    """Name of the InferencePool that it belongs to; empty: its source knows no pools."""
    adapters: frozenset[str] = frozenset()
    """LoRA adapters that the source declares to be on it."""
    labels: Mapping[str, str] = field(default_factory=dict)
    incarnation: str = ""
    """Changes when the server's process was restarted: same name, cold cache."""
    kv_events: str = ""
    """Where it publishes KV events, as a ZeroMQ address; empty: where the configuration says."""
    kv_replay: str = ""
    """Where it replays those that were missed; with `kv_events` alone: nowhere."""
    metrics: str = ""
    """Where its metrics page is, as `[:port][/path]` (`METRICS_PLACE`).
    What is left out is the serving port, and the policy's path."""
    role: Role = Role.UNSAID
    rank: int | None = None
    """Which data parallel rank of its server it is; None: it is a whole server."""
    behind: Address | None = None
    """Where requests for this rank go, which the server's front hands on; None: to its own address."""

    @property
    def destination(self) -> Address:
        """What the data plane is told."""
        return self.behind or self.address


class ApiKind(enum.StrEnum):
    """Which API a body belongs to. OTHER is routed by load alone."""

    COMPLETIONS = "completions"
    CHAT = "chat"
    RESPONSES = "responses"
    EMBEDDINGS = "embeddings"
    MESSAGES = "messages"
    OTHER = "other"


class InferenceRequest(Struct, frozen=True, gc=False):
    """What a request body says that matters for routing, read once."""

    kind: ApiKind
    model: str = ""
    """The body's `model`: a base model or a LoRA adapter; the endpoints know which."""
    prompt: bytes = b""
    """Canonical prompt: UTF-8 text between separator bytes (token ids: four little-endian bytes each);
    empty when there is none."""
    more_prompt_bytes: int = 0
    """Size of a batch's other prompts; they count as work and are not matched."""
    token_ids: bool = False
    """The prompt came as token ids, so four bytes are exactly one token."""
    opaque: bool = False
    """Something stands in `prompt` by a hash or id (media, a stored conversation):
    its bytes do not tell its tokens. Without a prompt: the body is an upload, not JSON."""
    cache_salt: str = ""
    stream: bool = False
    include_usage: bool = False
    max_tokens: int | None = None
    priority: int = 0
    """vLLM's: the lower goes first."""
    unread: str = ""
    """Why the body was not read, as a short label; its request is routed by load.
    Empty: it was read, or there is none."""
    shaping: bytes = b""
    """The body's fields, as a JSON object, that change what the server makes of the prompt (arguments of the
    chat template and the like); empty in nearly every request. Read by exact mode alone."""

    @property
    def held_bytes(self) -> int:
        """Memory of whoever holds on to it."""
        return len(self.prompt) + len(self.shaping)


class PromptSize(Struct, frozen=True, gc=False):
    """What of a prompt tells its tokens."""

    text_bytes: int
    continuation_bytes: float = 0.0
    """The part of them that continues a letter beyond ASCII."""
    opaque: int = 0
    """Things that stand in the prompt by a hash or id: pictures, stored conversations."""


@dataclass(frozen=True, slots=True)
class EndpointMetrics:
    """One scrape of one server, in the field's units. None: the server does not say."""

    scraped_at: float
    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None
    """Share of the KV cache in use, 0 to 1."""
    capacity_tokens: int | None = None
    block_size: int | None = None
    prompt_tokens: float | None = None
    """Counter: tokens of all prompts whose prefill has finished."""
    cached_prompt_tokens: float | None = None
    """Counter: the part of `prompt_tokens` that came from the prefix cache."""
    generated_tokens: float | None = None
    """Counter: tokens of all answers; they take cache as prompts do."""
    prefix_queries: float | None = None
    prefix_hits: float | None = None
    finished: float | None = None
    """Counter: requests finished."""
    ttft_sum_s: float | None = None
    ttft_count: float | None = None
    prefill_sum_s: float | None = None
    """Counter: seconds between admission and first token, of requests that have ended;
    so are the next two."""
    prefill_count: float | None = None
    prefill_tokens: float | None = None
    """Prompt tokens computed in those prefills, cached ones left out."""
    max_lora: int | None = None
    active_adapters: frozenset[str] = frozenset()
    """Adapters with requests running or waiting; an idle loaded adapter is not listed."""
    loaded_adapters: frozenset[str] | None = None
    """Adapters in GPU slots, idle ones too. None: the server does not say, as most do not yet."""

    @property
    def known_adapters(self) -> frozenset[str]:
        """All that the server names."""
        loaded = self.loaded_adapters
        if not loaded:
            return self.active_adapters
        # A page may name thousands, and picks ask:
        # nothing is copied where the active ones are among the loaded.
        return loaded if self.active_adapters <= loaded else self.active_adapters | loaded

    @property
    def inside(self) -> int | None:
        """Requests in the server. None: the page does not say both how many run and how many wait."""
        if self.running is None or self.waiting is None:
            return None
        return self.running + self.waiting
