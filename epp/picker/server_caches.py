"""A request's prompt as a chain of hashes, and what each server holds of it, as far as the picker knows.

Owns the prefix table, the schedule of chunks, the seeds of hashes, and what the picker learns about each
model. Every mirror of an endpoint gets its size here, as the server states it or as the policy assumes it.
Everything here is synchronous and belongs to one picker. Callers: the picker and its parts.

Each hash of a chain names the whole prefix up to the end of its chunk. Invariants: where a chunk ends depends
on its position alone, so the chain of a prefix is a prefix of the chain; chains of different models,
adapters, salts, schedules, secrets or scheme versions start from different seeds. Every replica of the picker
must compute the same values.
"""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from functools import lru_cache, partial
from hashlib import blake2b
from itertools import pairwise
from operator import mul
from typing import cast

import numpy as np
from msgspec import Struct
from xxhash import xxh3_64_intdigest

from epp.base.types import ApiKind, ChunkHash, EndpointMetrics, EndpointName, InferenceRequest, PromptSize
from epp.config.policy import Chunks, PolicySpec
from epp.picker.endpoints.endpoint_state import EndpointState
from epp.picker.endpoints.learned import MOST_BYTES_PER_TOKEN, Terms, TokenEstimate, growth
from epp.picker.endpoints.served_models import forget_models
from epp.picker.prefix_index._chain import chain_of
from epp.picker.prefix_index.reported import KvReport, correct
from epp.picker.prefix_index.secret import HashSecret
from epp.picker.prefix_index.table import PrefixTable, chunks_in, end_bytes
from epp.picker.prefix_index.upkeep import add_endpoint, clear_endpoint, resize
from epp.picker.scheduling.snapshot import MOST_KEPT, Floats, Ints
from epp.request.canonical import CONTINUING

_SCHEME = b"prefix-gateway chain 2"
"""Increase this number whenever the canonical form of prompts or any hash of this module changes. Old hashes
then match nothing."""
_LONG_BYTES = 241
"""The least size of chunks that `_chain.c` can hash; XXH3 is another function for shorter ones."""
_SAMPLE_BYTES = 2048
_MOST_UNREAD_BYTES = 256 * 1024
"""Bound for an unread body, which may have any size and is seldom all text. With a larger bound, the server
of such a body would get no other request for a minute.
"""


class Prompt(Struct, frozen=True, gc=False):
    """The facts about one request's prompt that the mirrors need."""

    size: PromptSize
    tokens: int
    chain: list[ChunkHash]
    teaches: bool
    """Whether its size shows something about the tokenizer: it is neither token ids nor an unread body."""


class Roots:
    """The seeds of the first hashes of chains. Prompts that may not share a server's cache never have the
    same seed.

    Only the seeds of names without a salt are remembered, and of a bounded number of them, since clients may
    send as many models and salts as requests.
    """

    def __init__(self, schedule: Chunks, *, secret: bytes = b"") -> None:
        """secret: at most 64 bytes. Without the secret nobody can find out which texts have equal hashes."""
        sizes = (schedule.size_bytes, schedule.later_size_bytes, schedule.later_from_bytes)
        self._start = blake2b(_framed(_SCHEME, *(b"%d" % n for n in sizes)), digest_size=8, key=secret)
        self._without_salt = lru_cache(MOST_KEPT)(partial(self._seed, ""))

    @property
    def fingerprint(self) -> str:
        """Return a number that differs if schedule, scheme or secret differ. The fingerprint reveals none of
        these.
        """
        name = self._start.copy()
        name.update(b"fingerprint")
        return name.hexdigest()

    def seed(self, *, model: str, cache_salt: str = "") -> int:
        return self._seed(cache_salt, model) if cache_salt else self._without_salt(model)

    def _seed(self, cache_salt: str, model: str) -> int:
        root = self._start.copy()
        root.update(_framed(*(text.encode("utf-8", "surrogatepass") for text in (model, cache_salt))))
        return int.from_bytes(root.digest(), "little")


def _framed(*parts: bytes) -> bytes:
    """Join the parts, each after its length, so that different lists of parts never give equal bytes."""
    return b"".join(len(part).to_bytes(8, "little") + part for part in parts)


def hash_chain(prompt: bytes, *, seed: int, schedule: Chunks) -> list[ChunkHash]:
    """Return the hashes of the prompt's full chunks, each seeded with the one before, the first with
    `seed`.
    """
    size, later, count = schedule.size_bytes, schedule.later_size_bytes, chunks_in(schedule, len(prompt))
    if min(size, later) >= _LONG_BYTES:
        early = min(count, schedule.early)
        chain = chain_of(prompt, seed, size, early, later, count - early)
    else:
        spans = pairwise(end_bytes(schedule, k) for k in range(count + 1))
        chain = [seed := xxh3_64_intdigest(prompt[start:end], seed) for start, end in spans]
    return cast("list[ChunkHash]", chain)


class ServerCaches:
    def __init__(self, spec: PolicySpec, *, secret: HashSecret) -> None:
        self.spec = spec
        self.secret = secret
        self._token_estimates: dict[str, TokenEstimate] = {}
        self.corrected = {"credited": 0, "forgotten": 0}
        """How often the servers' own events corrected the table, in exact mode. See `correct`."""
        self._start_table()
        self._slots: Ints = np.empty(0, dtype=np.int64)
        """The slot of each bit of the table's masks. Servers without a slot get the slot after the last."""

    def _start_table(self) -> None:
        """Start with an empty table without servers. The caller then adds each server."""
        self.roots = Roots(self.spec.chunks, secret=self.secret.key)
        self.table = PrefixTable(schedule=self.spec.chunks, max_entries=self.spec.table.max_entries)
        """Another table replaces this one when prompts are cut or hashed differently."""

    def apply(self, spec: PolicySpec) -> bool:
        """Use another policy. Return False if the table starts again without servers, because prompts are cut
        differently now.
        """
        old, self.spec = self.spec, spec
        if old.chunks == spec.chunks:
            self.table.max_entries = spec.table.max_entries
            return True
        self._start_table()
        return False

    def set_secret(self, secret: HashSecret) -> None:
        """Use another secret for hashes. The table starts again without servers: its hashes have lost their
        meaning.
        """
        self.secret = secret
        self._start_table()

    def token_estimate(self, model: str) -> TokenEstimate:
        """Return what was learned about the tokens of a model's prompts."""
        if model not in self._token_estimates:
            self._token_estimates[model] = TokenEstimate(start=self.spec.table.bytes_per_token)
        return self._token_estimates[model]

    def forget_models(self, present: AbstractSet[str]) -> None:
        """If there are many models, forget what was learned of models that no server has any more."""
        forget_models(self._token_estimates, present)

    def take_in(self, findings: Sequence[KvReport]) -> None:
        """Correct the table by the servers' own events about their caches."""
        correct(self.table, findings, self.corrected)

    # -- servers ---------------------------------------------------------------------------------------------

    def add(self, state: EndpointState) -> None:
        """Start an empty mirror for a server."""
        add_endpoint(self.table, state.endpoint.name, capacity_bytes=self._capacity_bytes(state))

    def fit(self, state: EndpointState) -> None:
        """Let the mirror of a server follow the server's capacity."""
        table, name = self.table, state.endpoint.name
        capacity, had = self._capacity_bytes(state), table.mirrors[name].capacity_bytes
        if abs(capacity - had) > 0.02 * had:
            resize(table, name, capacity_bytes=capacity)

    def take_page(self, state: EndpointState, before: EndpointMetrics | None, after: EndpointMetrics) -> None:
        """Take in one scrape, which the endpoint's state has already taken in. before: the last scrape of the
        same process.
        """
        if sample := state.window.sample(after):
            self.token_estimate(state.model).learn(*sample)
        if before is None or after.prefix_hits is None or growth(before.prefix_hits, after.prefix_hits):
            state.missed = 0
        elif state.missed >= 8:  # the server has emptied its cache
            state.missed = 0
            clear_endpoint(self.table, state.endpoint.name)
        self.fit(state)

    def _capacity_bytes(self, state: EndpointState) -> int:
        stated = state.metrics.capacity_tokens if state.metrics else None
        tokens = stated or self.spec.table.default_capacity_tokens
        return int(tokens * self.token_estimate(state.model).bytes_per_token)

    # -- prompts ---------------------------------------------------------------------------------------------

    def beginning(self, prompt: Prompt) -> int:
        """Return the hash of the prompt's first bytes, as many as the policy's `prefixHash` says. 0: the
        prompt has no full chunk.
        """
        chunks = max(1, chunks_in(self.spec.chunks, self.spec.prefix_hash.size_bytes))
        return prompt.chain[:chunks][-1] if prompt.chain else 0

    def prompt(
        self, inference: InferenceRequest, *, base_model: str, name: str | None = None, body_bytes: int
    ) -> Prompt:
        """Return the prompt of a request to servers of `base_model`. name: the name of the model whose
        prompts share a cache. None: the request's own.
        """
        size = prompt_size(inference, body_bytes=body_bytes)
        chain = self.chain(inference, name=name)
        if inference.token_ids:
            return Prompt(size, size.text_bytes // 4, chain, teaches=False)
        tokens = estimated_tokens(size, self.token_estimate(base_model).terms)
        return Prompt(size, tokens, chain, teaches=bool(inference.prompt))

    def cached_tokens(self, prompt: Prompt, block_tokens: Ints) -> tuple[Floats, int]:
        """Return the tokens of the prompt that each server would take from its cache, by slot: whole blocks.
        And the hash of the prompt's last chunk that any server holds, or 0.

        block_tokens: by slot, with one more value at the end for servers without a slot.
        """
        found = self.table.holders(prompt.chain)
        if not found:
            return np.zeros(len(block_tokens) - 1), 0
        cached = np.zeros(len(block_tokens))
        for mask, chunks in found:
            slots, tokens = self._slots_of(mask), self._tokens_of(prompt, chunks)
            block = int(block_tokens[slots]) if isinstance(slots, int) else block_tokens[slots]
            cached[slots] = tokens // block * block
        return cached[:-1], prompt.chain[found[0][1] - 1]

    def cached_at(self, state: EndpointState, prompt: Prompt, chunks: int) -> int:
        """Return the tokens of the prompt that the server takes from its cache, if it holds `chunks`."""
        block_tokens = (state.metrics.block_size if state.metrics else None) or 1
        return self._tokens_of(prompt, chunks) // block_tokens * block_tokens

    def _tokens_of(self, prompt: Prompt, chunks: int) -> int:
        """Return the tokens of a prompt's first chunks, and never all of the prompt, since a server computes
        at least the last token to have an output.
        """
        tokens_per_byte = prompt.tokens / max(1, prompt.size.text_bytes)
        return max(0, min(int(end_bytes(self.spec.chunks, chunks) * tokens_per_byte), prompt.tokens - 1))

    def align(self, names: Sequence[EndpointName]) -> None:
        """Follow the fleet's slots after servers came or went, or after the table started again."""
        slot_of, none = {name: slot for slot, name in enumerate(names)}, len(names)
        slots = [slot_of.get(mirror.name, none) if mirror else none for mirror in self.table.by_bit]
        self._slots = np.array(slots, dtype=np.int64)

    def _slots_of(self, mask: int) -> int | Ints:
        """Return the slots of the servers in a mask. A single slot is returned as a number."""
        if not mask & (mask - 1):  # one server, or none: the case of most prompts
            return self._slots.item(mask.bit_length() - 1)
        as_bytes = np.frombuffer(mask.to_bytes(-(-mask.bit_length() // 8), "little"), dtype=np.uint8)
        return self._slots[np.unpackbits(as_bytes, bitorder="little").nonzero()[0]]

    def chain(self, inference: InferenceRequest, *, name: str | None = None) -> list[ChunkHash]:
        """Return the chain of the request's prompt. Empty: it has no prompt. name: as for `prompt`."""
        if not inference.prompt:
            return []
        model = inference.model if name is None else name
        seed = self.roots.seed(model=model, cache_salt=inference.cache_salt)
        return hash_chain(inference.prompt, seed=seed, schedule=self.spec.chunks)


def estimated_tokens(size: PromptSize, terms: Terms) -> int:
    """Return the estimated tokens of one prompt, at least one for each 64 bytes.
    terms: see `TokenEstimate`.
    """
    a, b, *of_media = terms
    estimate = a * size.text_bytes + b * size.continuation_bytes
    if any(size.media):
        estimate += sum(map(mul, of_media, size.media))
    return int(max(estimate, size.text_bytes / MOST_BYTES_PER_TOKEN))


def prompt_size(request: InferenceRequest, *, body_bytes: int = 0) -> PromptSize:
    """Return the properties of a request's prompts that predict their tokens: bytes, bytes that continue a
    letter beyond ASCII, and the guessed tokens of parts that are only named by a hash. An unread body counts
    by its size, up to a bound.

    A tokenizer makes a token of about four letters of English and of about one of Chinese, so bytes alone
    mislead where both occur. Only a sample of a long prompt is read, since this function runs on every
    request.
    """
    prompt, size = request.prompt, len(request.prompt)
    total = size + request.more_prompt_bytes
    if request.kind is ApiKind.QUERY:
        return PromptSize(text_bytes=0)
    if not total:
        most = 4096 if any(request.media) else _MOST_UNREAD_BYTES
        return PromptSize(min(body_bytes, most), media=request.media)
    if request.token_ids or not size:
        return PromptSize(text_bytes=total)
    # The stride is a multiple of six plus one, so the samples cannot stay in step with letters of two or
    # three bytes.
    sample = prompt[:: 6 * (size // (6 * _SAMPLE_BYTES)) + 1]
    continuing = 0 if sample.isascii() else len(sample) - len(sample.translate(None, CONTINUING))
    return PromptSize(total, continuing * total / len(sample), request.media)
