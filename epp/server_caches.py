"""The picker's belief about the content of the servers' caches: the prefix table, with chunks as the policy
says, and with the cache sizes that servers state or that the picker has learned.

Owns the table, the schedule of chunks, and everything that the picker learns about each model. Everything
here is synchronous and belongs to one picker, its only caller.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet

import msgspec
import numpy as np

from epp.config.policy import PolicySpec
from epp.endpoints.growth import growth
from epp.endpoints.learned import MOST_BYTES_PER_TOKEN, CacheSize, Learned, TokenEstimate, sample_of
from epp.endpoints.served_models import forget_models
from epp.endpoints.state import EndpointState
from epp.prefix_index.eviction import charge
from epp.prefix_index.hashing import ChunkSchedule, Roots, continued_chain, hash_chain
from epp.prefix_index.reported import ReportedCaches
from epp.prefix_index.secret import HashSecret
from epp.prefix_index.table import Mirror, PrefixTable, Recorded
from epp.request.canonical import OPAQUE
from epp.request.jsontext import continued
from epp.request.response import next_turn_prompt
from epp.scheduling.least_cost import AtOnce, Demand
from epp.scheduling.snapshot import NO_SERVERS, Floats, Ints
from epp.types import ChunkHash, EndpointMetrics, EndpointName, InferenceRequest, PromptSize, Value

_STATED_SPAN = 1.25
"""A size that the server states is corrected by at most this factor, up or down, since running requests use a
part of the cache."""
_ASSUMED_SPAN = 32.0
"""A size that the policy assumes is corrected by at most this factor."""
_FULL_SHARE = 0.9
"""A mirror that uses this share of its size would hold more if it were larger."""
_RESIZE_RATIO = 0.02
"""Smaller changes of a capacity are ignored."""
_TOKEN_ID_BYTES = 4
_SAMPLE_BYTES = 2048
_MOST_UNREAD_BYTES = 256 * 1024
"""Bound for an unread body, which may have any size and is seldom all text. With a larger bound, the server
of such a body would get no other request for a minute.
"""
_MEDIA_BYTES = 4096
"""Bytes that count for a recording or another upload that is not JSON. The size of an upload does not show
how many tokens it makes.
"""


class Prompt(Value, frozen=True):
    """The facts about one request's prompt that the mirrors need."""

    size: PromptSize
    tokens: int
    chain: list[ChunkHash]
    teaches: bool
    """Whether its size shows something about the tokenizer: it is neither token ids nor an unread body."""

    @property
    def whole(self) -> int:
        """Return a number that prompts with the same full chunks and the same length share. 0: there is no
        full chunk.
        """
        return self.chain[-1] ^ self.size.text_bytes if self.chain else 0


class Slots:
    """Converts the bits of the table's masks into slots of the fleet. Servers without a slot get the slot
    after the last.
    """

    def __init__(self, names: Sequence[EndpointName], mirrors: Sequence[Mirror | None]) -> None:
        """Prepare the conversion. mirrors: the mirrors in the order of their bits. Slots are valid until a
        server comes or goes.
        """
        self._names = names
        slot_of = {name: slot for slot, name in enumerate(names)}
        self._slots = [slot_of.get(mirror.name, len(names)) if mirror else len(names) for mirror in mirrors]
        self._by_bit: Ints = np.array(self._slots, dtype=np.int64)

    def of(self, mask: int) -> int | Ints:
        """Return the slots of the servers in a mask. A single slot is returned as a number."""
        if not mask & (mask - 1):  # one server, or none: the case of most prompts
            return self._slots[mask.bit_length() - 1]
        as_bytes = np.frombuffer(mask.to_bytes(-(-mask.bit_length() // 8), "little"), dtype=np.uint8)
        return self._by_bit[np.flatnonzero(np.unpackbits(as_bytes, bitorder="little"))]

    def name(self, slot: int) -> EndpointName:
        return self._names[slot] if slot < len(self._names) else EndpointName("")


class ServerCaches:
    def __init__(self, spec: PolicySpec, *, secret: HashSecret) -> None:
        self._spec = spec
        self._secret = secret
        self._learned: dict[str, Learned] = {}
        self.schedule = _schedule(spec)
        self.roots = Roots(self.schedule, secret=secret.key)
        self.table = self._new_table()
        """Another table replaces this one when prompts are cut or hashed differently."""
        self.demand = Demand()
        """When each prefix was last asked for."""
        self.at_once = AtOnce()
        """How many requests come at once with the same prompt."""
        self._slots = Slots((), ())
        self.nothing: Floats = NO_SERVERS
        """The `cached_tokens` of a prompt that no server holds any part of. No code writes to this array."""
        self.reported = ReportedCaches()
        """The reports of servers about their caches, in exact mode."""

    def apply(self, spec: PolicySpec, states: Iterable[EndpointState]) -> bool:
        """Use another policy. Return False if the table starts empty, because prompts are cut differently
        now.
        """
        old, self._spec = self._spec, spec
        if old.chunks == spec.chunks:
            self.table.set_bounds(max_entries=spec.table.max_entries, ttl_s=spec.table.ttl_seconds)
            for state in states:
                self.fit(state)
            return True
        self.schedule = _schedule(spec)
        self._restart_table(states)
        return False

    @property
    def secret(self) -> HashSecret:
        return self._secret

    def set_secret(self, secret: HashSecret, states: Iterable[EndpointState]) -> None:
        """Use another secret for hashes. The table starts empty: its hashes have lost their meaning."""
        self._secret = secret
        self._restart_table(states)

    def _restart_table(self, states: Iterable[EndpointState]) -> None:
        self.roots = Roots(self.schedule, secret=self._secret.key)
        self.table = self._new_table()
        self.reported.slower.clear()
        for state in states:
            self.add(state)

    def add(self, state: EndpointState) -> None:
        self.table.add_endpoint(state.endpoint.name, capacity_bytes=self._capacity_bytes(state))

    def learned(self, model: str) -> Learned:
        """Return the figures learned from the servers of a model."""
        known = self._learned.get(model)
        if known is None:
            tokens = TokenEstimate(start=self._spec.table.bytes_per_token)
            known = self._learned[model] = Learned(tokens=tokens, cache=CacheSize())
        return known

    def forget_models(self, present: AbstractSet[str]) -> None:
        """If there are many models, forget the learned figures of models that no server has any more."""
        forget_models(self._learned, present)

    def observe(
        self, state: EndpointState, before: EndpointMetrics | None, after: EndpointMetrics, *, now: float
    ) -> None:
        """Learn from one scrape, which the endpoint's state has already taken in. before: the last scrape of
        the same process.
        """
        name, tokens = state.endpoint.name, self.learned(state.model).tokens
        sample = sample_of(state.window, after)
        if sample:
            tokens.learn(*sample)
        if before is not None:
            answered = growth(before.generated_tokens, after.generated_tokens)
            if answered and not self._outgrown(state):
                charge(self.table, name, size_bytes=int(answered * tokens.bytes_per_token), now=now)
        self._learn_size(state, after, now=now)
        self.fit(state)

    # -- prompts ---------------------------------------------------------------------------------------------

    def beginning(self, prompt: Prompt) -> int:
        """Return the hash of the prompt's first bytes, as many as the policy's `prefixHash` says. 0: the
        prompt has no full chunk.
        """
        chunks = max(1, self.schedule.chunks_in(self._spec.prefix_hash.size_bytes))
        return prompt.chain[:chunks][-1] if prompt.chain else 0

    def prompt(self, inference: InferenceRequest, *, base_model: str, body_bytes: int) -> Prompt:
        """Return the prompt of a request to servers of `base_model`."""
        size = prompt_size(inference, body_bytes=body_bytes)
        if inference.token_ids:
            return Prompt(size, size.text_bytes // _TOKEN_ID_BYTES, self.chain(inference), teaches=False)
        tokens = estimated_tokens(size, self.learned(base_model).tokens.terms)
        return Prompt(size, tokens, self.chain(inference), teaches=bool(inference.prompt))

    def cached_tokens(self, prompt: Prompt, found: Sequence[tuple[int, int]], block_tokens: Ints) -> Floats:
        """Return the tokens of the prompt that each server would take from its cache, by slot: whole blocks,
        and never all of the prompt, since a server computes at least the last token to have an output.

        found: the table's holders of the prompt.
        block_tokens: by slot, with one more value at the end for servers without a slot.
        """
        if not found:
            if len(self.nothing) != len(block_tokens) - 1:
                self.nothing = np.zeros(len(block_tokens) - 1)
            return self.nothing
        cached = np.zeros(len(block_tokens))
        tokens_per_byte = prompt.tokens / max(1, prompt.size.text_bytes)
        for mask, chunks in found:
            slots = self._slots.of(mask)
            if self.reported.slower:
                self._fill_by_tier(cached, slots, prompt, chunks, block_tokens)
                continue
            tokens = _most_cached(self.schedule.end_bytes(chunks) * tokens_per_byte, prompt)
            block = int(block_tokens[slots]) if isinstance(slots, int) else block_tokens[slots]
            cached[slots] = tokens // block * block
        return cached[:-1]

    def _fill_by_tier(
        self, cached: Floats, slots: int | Ints, prompt: Prompt, chunks: int, block_tokens: Ints
    ) -> None:
        """Fill in `cached_tokens` of servers that may hold a part of their chunks in a slower tier."""
        tokens_per_byte = prompt.tokens / max(1, prompt.size.text_bytes)
        shares = self._spec.tiers.shares
        for slot in np.atleast_1d(slots).tolist():
            name, held = self._slots.name(slot), prompt.chain[:chunks]
            worth_bytes = self.reported.worth_bytes(name, held, schedule=self.schedule, shares=shares)
            block = block_tokens[slot]
            cached[slot] = _most_cached(worth_bytes * tokens_per_byte, prompt) // block * block

    def align(self, names: Sequence[EndpointName]) -> None:
        """Follow the fleet's slots after servers came or went, or after the table started again."""
        self._slots = Slots(names, self.table.by_bit)

    def record(
        self, state: EndpointState, prompt: Prompt, *, cached_tokens: int, now: float
    ) -> Recorded | None:
        """Record that the server holds the prompt from now on. Before, it held `cached_tokens` of the prompt.
        None: the prompt has no chunk.
        """
        if not prompt.chain:
            return None
        recorded = self.table.record(state.endpoint.name, prompt.chain, now=now)
        state.hits.predicted(
            self.learned(state.model).cache.staleness,
            tokens=cached_tokens,
            others=prompt.tokens - cached_tokens,
            unused_s=recorded.unused_s,
        )
        return recorded

    def chain(self, inference: InferenceRequest) -> list[ChunkHash]:
        """Return the chain of the request's prompt. Empty: it has no prompt."""
        if not inference.prompt:
            return []
        return hash_chain(inference.prompt, seed=self._seed(inference), schedule=self.schedule)

    def remainder(self, inference: InferenceRequest, chain: Sequence[ChunkHash]) -> InferenceRequest:
        """Return the request with only those bytes of its prompt that are in no chunk. The chain of the next
        turn needs no more.
        """
        covered = self.schedule.end_bytes(len(chain))
        return msgspec.structs.replace(inference, prompt=inference.prompt[covered:], shaping=b"")

    def next_turn_chain(
        self, chain: Sequence[ChunkHash], remainder: InferenceRequest, answer_text: str
    ) -> list[ChunkHash]:
        """Return the chain with which the next turn will begin. Empty: this cannot be predicted. chain,
        remainder: those of this turn.
        """
        grown = next_turn_prompt(remainder, answer_text)
        if grown is None:
            return []
        return continued_chain(chain, grown, seed=self._seed(remainder), schedule=self.schedule)

    def _seed(self, inference: InferenceRequest) -> int:
        return self.roots.seed(model=inference.model, cache_salt=inference.cache_salt)

    def _new_table(self) -> PrefixTable:
        table = self._spec.table
        return PrefixTable(schedule=self.schedule, max_entries=table.max_entries, ttl_s=table.ttl_seconds)

    def _learn_size(self, state: EndpointState, metrics: EndpointMetrics, *, now: float) -> None:
        if metrics.prefix_hits is None or not self._spec.table.learn_capacity:
            return
        mirror = self.table.mirrors[state.endpoint.name]
        self.learned(state.model).cache.observe(
            state.hits,
            hits=metrics.prefix_hits,
            waiting=metrics.waiting,
            bounded=mirror.used_bytes > _FULL_SHARE * mirror.capacity_bytes,
            span=_STATED_SPAN if metrics.capacity_tokens else _ASSUMED_SPAN,
            now=now,
        )

    def fit(self, state: EndpointState) -> None:
        """Let the table's share for a server follow the server's capacity."""
        name = state.endpoint.name
        capacity, had = self._capacity_bytes(state), self.table.mirrors[name].capacity_bytes
        if abs(capacity - had) > _RESIZE_RATIO * had:
            self.table.resize(name, capacity_bytes=capacity)

    def _capacity_bytes(self, state: EndpointState) -> int:
        """Return the capacity of the server's mirror. It has room for everything that the server says it
        holds, since a guess must not evict that.
        """
        return max(self._assumed_bytes(state), self.reported.known_bytes.get(state.endpoint.name, 0))

    def _assumed_bytes(self, state: EndpointState) -> int:
        stated = state.metrics.capacity_tokens if state.metrics else None
        tokens = stated or self._spec.table.default_capacity_tokens
        learned = self.learned(state.model)
        factor = learned.cache.factor if self._spec.table.learn_capacity else 1.0
        return int(tokens * factor * learned.tokens.bytes_per_token)

    def _outgrown(self, state: EndpointState) -> bool:
        """Return whether the server says that it holds more than the assumed size of its cache."""
        return self.reported.known_bytes.get(state.endpoint.name, 0) > self._assumed_bytes(state)


def _most_cached(held_tokens: float, prompt: Prompt) -> int:
    return max(0, min(int(held_tokens), prompt.tokens - 1))


def _schedule(spec: PolicySpec) -> ChunkSchedule:
    return ChunkSchedule(
        chunk_bytes=spec.chunks.size_bytes,
        later_chunk_bytes=spec.chunks.later_size_bytes,
        later_from_bytes=spec.chunks.later_from_bytes,
    )


def estimated_tokens(size: PromptSize, terms: tuple[float, float, float]) -> int:
    """Return the estimated tokens of one prompt, at least one for each 64 bytes.
    terms: see `TokenEstimate`.
    """
    a, b, c = terms
    estimate = a * size.text_bytes + b * size.continuation_bytes + c * size.opaque
    return int(max(estimate, size.text_bytes / MOST_BYTES_PER_TOKEN))


def prompt_size(request: InferenceRequest, *, body_bytes: int = 0) -> PromptSize:
    """Return the properties of a request's prompts that predict their tokens: bytes, bytes that continue a
    letter beyond ASCII, and parts that are only named by a hash. An unread body counts by its size, up to a
    bound.

    A tokenizer makes a token of about four letters of English and of about one of Chinese, so bytes alone
    mislead where both occur. Only a sample of a long prompt is read, since this function runs on every
    request.
    """
    prompt, size = request.prompt, len(request.prompt)
    total = size + request.more_prompt_bytes
    if not total:
        if request.opaque:
            return PromptSize(text_bytes=min(body_bytes, _MEDIA_BYTES), opaque=1)
        return PromptSize(text_bytes=min(body_bytes, _MOST_UNREAD_BYTES))
    if request.token_ids or not size:
        return PromptSize(text_bytes=total)
    # The stride is a multiple of six plus one, so the samples cannot stay in step with letters of two or
    # three bytes.
    seen, found = continued(prompt, 6 * (size // (6 * _SAMPLE_BYTES)) + 1)
    opaque = max(1, prompt.count(OPAQUE)) if request.opaque else 0
    return PromptSize(total, found * total / seen, opaque)
