"""Defines the value types that the picker's packages share.

Everything here is immutable. This module imports no other module of `epp`. Values that are made for every
request are msgspec structs, because creating one takes a tenth of the time of a frozen dataclass. Units are
in the names. Times are monotonic seconds.
"""

from __future__ import annotations

import enum
import ipaddress
import re
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import add
from typing import Final, NamedTuple, NewType

from msgspec import Struct

RANK_ADDRESS: Final = "x-data-parallel-host-port"
"""The request header with the address of the data parallel rank that gets the request. The server's front
reads it."""
RANK: Final = "x-data-parallel-rank"
"""The request header with the number of the data parallel rank, as vLLM and SGLang read it."""
PREFILLER: Final = "x-prefiller-host-port"
"""The request header that names the server that computes the prompt for the answering server. llm-d's sidecar
reads it.
"""
SERVER_HEADERS: Final = (
    PREFILLER,
    "x-llm-d-prefiller-host-port",
    "x-prefiller-url",  # llm-d's sidecar reads this header if the newer one is missing
    RANK_ADDRESS,
    RANK,
    "x-encoder-hosts-ports",
    "x-llm-d-encoder-hosts-ports",
    "x-kv-cache-source-host-port",
    "x-llm-d-kv-cache-source-host-port",
)
"""Request headers that servers and their sidecars obey. The picker removes them from clients' requests,
because they would make a server call an address of the client's choice.
"""

METRICS_PLACE: Final = re.compile(r"(:[1-9][0-9]{0,4})?(/[A-Za-z0-9._~/-]{0,255})?")
"""A place on the server itself: another port, another path, or both."""

ChunkHash = NewType("ChunkHash", int)
"""The xxh3_64 of a chunk, seeded with the hash of the chunk before it. So the hash names the whole prefix up
to the end of the chunk.
"""


def pack_hashes(chain: Sequence[int]) -> bytes:
    """Return hashes as bytes: eight each, little-endian, like every machine that this runs on."""
    return (chain if isinstance(chain, array) else array("Q", chain)).tobytes()


def unpack_hashes(data: bytes) -> list[int]:
    """Return the hashes in the bytes. Raises ValueError if they are not whole hashes."""
    hashes = array("Q")
    hashes.frombytes(data)
    return hashes.tolist()


EndpointName = NewType("EndpointName", str)
"""One serving port of one model server, unique in the pool: `pod` or `pod:port`."""


@dataclass(frozen=True, slots=True)
class Address:
    """An IP address and port, written `10.0.0.1:8000` or `[fd00::1]:8000`."""

    host: str
    port: int
    text: str = field(init=False, repr=False, compare=False)
    """The written form. It is made once, since each answer to the data plane names addresses."""

    def __post_init__(self) -> None:
        text = f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"
        object.__setattr__(self, "text", text)

    def __str__(self) -> str:
        return self.text

    @classmethod
    def parse(cls, text: str) -> Address:
        """Read `ip:port`, with IPv6 in brackets. Raises ValueError for other text, such as host names."""
        host, _, port = text.strip().rpartition(":")
        if len(port) > 5 or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
            raise ValueError(f"{text!r} is not ip:port (the port, such as :8000, is missing or out of range)")
        bracketed = host.startswith("[") and host.endswith("]")
        try:
            ip = ipaddress.ip_address(host[1:-1] if bracketed else host)
        except ValueError:
            raise ValueError(
                f"{text!r} is not ip:port, such as 10.0.0.1:8000 (no host names; an IPv6 address goes in brackets)"
            ) from None
        if bracketed != (ip.version == 6):
            raise ValueError(f"{text!r} is not ip:port (an IPv6 address goes in brackets)")
        return cls(host=str(ip), port=int(port))


class Role(enum.StrEnum):
    """The work of an endpoint where prefill and decode are on different servers (P/D)."""

    UNSAID = ""
    """The source names no role. The server answers requests, and computes only their prompts."""
    PREFILL = "prefill"
    """The server computes prompts for others, and is never a destination."""
    DECODE = "decode"
    """The server answers requests, and computes only their prompts, as with UNSAID."""
    BOTH = "both"
    """The server answers requests, and computes prompts for others too."""
    ENCODE = "encode"
    """The server encodes media for others. It computes no prompts and answers no requests."""

    @property
    def answers(self) -> bool:
        """Whether requests may be sent to an endpoint of this role."""
        return self not in (Role.PREFILL, Role.ENCODE)

    @property
    def prefills(self) -> bool:
        """Whether an endpoint of this role computes prompts that other servers answer."""
        return self in (Role.PREFILL, Role.BOTH)


ROLES: Final[Mapping[str, Role]] = {
    **{role.value: role for role in Role},
    "prefill-decode": Role.BOTH,
    "encode-prefill": Role.PREFILL,
    "encode-prefill-decode": Role.BOTH,
}
"""Each role by its name: ours, and those of llm-d's label."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A model server as its source (file, Kubernetes) describes it."""

    name: EndpointName
    address: Address
    model: str = ""
    """The base model that it serves. Empty: the source does not say."""
    pool: str = ""
    """Name of its InferencePool. Empty: the source knows no pools."""
    adapters: frozenset[str] = frozenset()
    """LoRA adapters on it, as the source declares."""
    incarnation: str = ""
    """A value that changes when the server's process restarts: the name is the same, but the cache is cold.
    """
    kv_events: str = ""
    """The ZeroMQ address at which the server publishes KV events. Empty: as the configuration says."""
    kv_replay: str = ""
    """The address at which the server replays missed KV events. Empty although `kv_events` is set: it replays
    none.
    """
    metrics: str = ""
    """The place of its metrics page, as `[:port][/path]` (`METRICS_PLACE`). A missing port means the serving
    port, and a missing path means the policy's path.
    """
    role: Role = Role.UNSAID
    rank: int | None = None
    """The number of this data parallel rank. None: the endpoint is a whole server."""
    behind: Address | None = None
    """Where requests for this rank go: the server's front, which passes them on. None: to its own address."""

    @property
    def process(self) -> tuple[Address, str, str]:
        """The values that identify the serving process. If one differs, another process serves with another
        cache.
        """
        return self.address, self.incarnation, self.model

    @property
    def destination(self) -> Address:
        """The address that the data plane gets."""
        return self.behind or self.address


class ApiKind(enum.StrEnum):
    """The API of a body. OTHER is any other API, and QUERY a call that computes no tokens, such as
    `count_tokens`.
    """

    COMPLETIONS = "completions"
    CHAT = "chat"
    RESPONSES = "responses"
    EMBEDDINGS = "embeddings"
    MESSAGES = "messages"
    QUERY = "query"
    OTHER = "other"


class Media(NamedTuple):
    """Guesses at the tokens for which a hash or id stands, by kind. Documents count as pictures."""

    pictures: int = 0
    sound: int = 0
    films: int = 0
    texts: int = 0
    others: int = 0


class InferenceRequest(Struct, frozen=True, gc=False):
    """The facts in a request body that matter for routing. The body is read once."""

    kind: ApiKind
    model: str = ""
    """The body's `model`: a base model or a LoRA adapter. The endpoints know which."""
    prompt: bytes = b""
    """Canonical prompt: UTF-8 text between separator bytes, or four little-endian bytes for each token id.
    Empty: there is none."""
    more_prompt_bytes: int = 0
    """Size of the other prompts of a batch. They count as work and are not matched."""
    token_ids: bool = False
    """Whether the prompt came as token ids, so that four bytes are exactly one token."""
    media: Media = Media()
    """Without a prompt: those of an upload. All 0: the bytes show all tokens."""
    cache_salt: str = ""
    stream: bool = False
    max_tokens: int | None = None
    unread: str = ""
    """Why the body was not read, as a short label. The request is then routed by load. Empty: it was read, or
    there is none."""
    names_state: str = ""
    """The id of a stored response, conversation or file that the body names. Only the server that made it
    knows it."""
    stores: bool = True
    """False: the client asks that the server keeps nothing of the answer."""
    shaped: bool = False
    """Whether fields of the body change how the server renders the prompt (template arguments and the like).
    Only exact mode asks: it does not follow such a prompt."""


class PromptSize(Struct, frozen=True, gc=False):
    """The properties of a prompt that predict its tokens."""

    text_bytes: int
    continuation_bytes: float = 0.0
    """The number of these bytes (`text_bytes`) that continue a letter beyond ASCII."""
    media: Media = Media()

    def __add__(self, other: PromptSize) -> PromptSize:
        """Return the size of two prompts together."""
        return PromptSize(
            self.text_bytes + other.text_bytes,
            self.continuation_bytes + other.continuation_bytes,
            Media(*map(add, self.media, other.media)) if any(other.media) else self.media,
        )


@dataclass(frozen=True, slots=True)
class EndpointMetrics:
    """One scrape of one server, in the units of the names. None: the server does not say."""

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
    """Counter: tokens of all answers. They take cache space as prompts do."""
    counts_at_end: bool = False
    """Whether the counters of tokens grow only when a request is over, as those of SGLang do."""
    prefix_queries: float | None = None
    prefix_hits: float | None = None
    finished: float | None = None
    """Counter: requests finished."""
    ttft_sum_s: float | None = None
    ttft_count: float | None = None
    max_lora: int | None = None
    active_adapters: frozenset[str] = frozenset()
    """Adapters with running or waiting requests. Loaded adapters that are idle are not listed."""
    loaded_adapters: frozenset[str] | None = None
    """Adapters in GPU slots, idle ones too. None: the server does not say, as with most servers today."""
    models: frozenset[str] = frozenset()
    """Names of models that stand on the page. A server may have more names and adapters."""
    asleep: bool = False
    """Whether an engine sleeps: it takes requests and answers none until it is woken."""

    inside: int | None = field(init=False)
    """Requests in the server, running or waiting. None: the page lacks one of these numbers."""
    known_adapters: frozenset[str] = field(init=False)
    """All adapters that the server names."""

    def __post_init__(self) -> None:
        inside = None if self.running is None or self.waiting is None else self.running + self.waiting
        object.__setattr__(self, "inside", inside)
        active, loaded = self.active_adapters, self.loaded_adapters
        # A page may name thousands of adapters, so nothing is copied if all active adapters are loaded.
        known = active if not loaded else loaded if active <= loaded else active | loaded
        object.__setattr__(self, "known_adapters", known)


class ModelCard(Struct, frozen=True, gc=False):
    """One model or adapter that a server lists. The fields are those of OpenAI and vLLM."""

    id: str
    object: str = "model"
    created: int = 0
    owned_by: str = ""
    root: str | None = None
    parent: str | None = None
    """The base model of an adapter. None: the card is that of a base model."""
    max_model_len: int | None = None


@dataclass(frozen=True)
class ModelList:
    """The models that one server lists. Never empty. Its sets are made once, because an index over a fleet
    needs the sets of all servers.
    """

    cards: tuple[ModelCard, ...]
    whole: bool = True
    """False: these are only the names on the server's metrics page, since it does not give its list."""

    @cached_property
    def base(self) -> str:
        """The name of the base model. A server may have several names for it, and the first counts."""
        return next((card.id for card in self.cards if card.parent is None), self.cards[0].id)

    @cached_property
    def max_model_len(self) -> int | None:
        """The most tokens of a prompt with its answer. Adapters have no limit of their own."""
        return next((card.max_model_len for card in self.cards if card.max_model_len), None)

    @cached_property
    def names(self) -> frozenset[str]:
        return frozenset(card.id for card in self.cards)

    @cached_property
    def bases(self) -> frozenset[str]:
        """The names of the base model: those of the cards with its root."""
        base = next((card for card in self.cards if card.parent is None), self.cards[0])
        same = (c.id for c in self.cards if c.parent is None and c.root == base.root and c.root is not None)
        return frozenset((base.id, *same))

    @cached_property
    def adapters(self) -> frozenset[str]:
        return frozenset(card.id for card in self.cards if card.parent is not None)
