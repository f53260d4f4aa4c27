"""Exact mode as its thread drives it: which servers are trusted, and what reaches the table."""

import itertools
import random
from collections.abc import Sequence

import msgspec
import pytest

from epp.base.types import ApiKind, ChunkHash, EndpointName, InferenceRequest
from epp.config.policy import Chunks, PolicySpec
from epp.picker.prefix_index.secret import HashSecret
from epp.picker.prefix_index.upkeep import add_endpoint
from epp.picker.server_caches import ServerCaches, hash_chain
from epp.sources.kvevents.decoding import Algorithm, BlockHasher
from epp.sources.kvevents.exact import Exact, ModelSettings
from epp.sources.kvevents.routed_prompts import RoutedPrompt
from epp.sources.kvevents.sequence import Forget
from tests.invariants.kvevents import check_exact
from tests.unit.sources.kvevents.routed import NoLanguage

A, B = EndpointName("a"), EndpointName("b")
BLOCK = 16
SCHEDULE = Chunks()
NO_TOKENIZER = ModelSettings(language=NoLanguage())


class TwoReportingServers:
    """Two servers that report what they store, and the table that follows them."""

    def __init__(self, settings: ModelSettings = NO_TOKENIZER, *, max_blocks: int = 10**5) -> None:
        self.exact = Exact({"": settings}, max_blocks=max_blocks, max_chunks=10**4)
        self.mirrors = ServerCaches(PolicySpec(), secret=HashSecret())
        self.clock = itertools.count(1)
        for name in (A, B):
            self.exact.add(name, model="")
            add_endpoint(self.mirrors.table, name, capacity_bytes=10**9)

    def tell(self, name: EndpointName, *events: object, complete: bool = True) -> None:
        payload = msgspec.msgpack.encode([0.0, list(events), 0])
        self.exact.apply(name, [payload], complete=complete, now=next(self.clock))

    def route(self, name: EndpointName, tokens: Sequence[int], *, adapter: str = "") -> None:
        prompt = b"".join(token.to_bytes(4, "little") for token in tokens)
        routed = RoutedPrompt(
            server=name,
            adapter=adapter,
            inference=InferenceRequest(kind=ApiKind.COMPLETIONS, prompt=prompt, token_ids=True),
            chain=self.chain(tokens),
            schedule=SCHEDULE,
        )
        self.exact.routed(routed, now=next(self.clock))

    def chain(self, tokens: Sequence[int]) -> list[ChunkHash]:
        return hash_chain(b"".join(t.to_bytes(4, "little") for t in tokens), seed=1, schedule=SCHEDULE)

    def held(self, tokens: Sequence[int], *, later_s: int = 0) -> dict[EndpointName, int]:
        self.clock = itertools.count(next(self.clock) + later_s)
        self.mirrors.take_in(self.exact.findings(now=next(self.clock)))
        check_exact(self.exact)
        return self.mirrors.table.match(self.chain(tokens))


def prompt_of(seed: int, *, blocks: int = 40) -> list[int]:
    return [random.Random(seed).randrange(50_000) for _ in range(blocks * BLOCK)]


def blocks_stored(
    tokens: Sequence[int], *, algorithm: Algorithm = "sha256", seed: str = "", medium: str = "GPU"
) -> dict[str, object]:
    return {
        "type": "BlockStored",
        "block_hashes": BlockHasher(algorithm, seed=seed).names(tokens, block_tokens=BLOCK),
        "parent_block_hash": None,
        "token_ids": list(tokens),
        "block_size": BLOCK,
        "lora_id": None,
        "medium": medium,
        "lora_name": None,
    }


def blocks_removed(tokens: Sequence[int], *, first: int = 0, medium: str = "GPU") -> dict[str, object]:
    names = BlockHasher("sha256").names(tokens, block_tokens=BLOCK)
    return {"type": "BlockRemoved", "block_hashes": names[first:], "medium": medium}


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor", "xxhash", "xxhash_cbor"])
def test_the_algorithm_is_learned_from_the_first_event(algorithm: Algorithm) -> None:
    fleet, tokens = TwoReportingServers(ModelSettings(language=NoLanguage(), seed="42")), prompt_of(1)
    fleet.route(A, tokens)  # no event has come yet
    fleet.tell(A, blocks_stored(tokens, algorithm=algorithm, seed="42"))
    fleet.route(A, tokens)
    assert fleet.held(tokens) == {A: len(fleet.chain(tokens))}
    status = fleet.exact.models()[""]
    assert (status.state, status.algorithm, status.block_tokens) == ("on", algorithm, BLOCK)
    assert (status.prompts["waiting"], status.prompts["matched"]) == (1, 1)


def test_removed_blocks_are_forgotten_and_those_of_the_other_server_stay() -> None:
    fleet, tokens = TwoReportingServers(), prompt_of(1)
    fleet.tell(A, blocks_stored(tokens))
    fleet.tell(B, blocks_stored(tokens))
    fleet.route(A, tokens)
    whole = len(fleet.chain(tokens))
    assert fleet.held(tokens) == {A: whole, B: whole}
    fleet.tell(A, blocks_removed(tokens, first=20))
    assert fleet.held(tokens) == {A: 20 * BLOCK * 4 // 256, B: whole}


def test_a_prompt_that_no_server_holds_is_credited_to_none() -> None:
    fleet, tokens = TwoReportingServers(), prompt_of(1)
    fleet.tell(A, blocks_stored(prompt_of(2)))
    fleet.route(A, tokens)
    assert fleet.held(tokens) == {}


def test_seed_that_is_not_the_servers_turns_the_model_off_with_the_reason() -> None:
    fleet, tokens = TwoReportingServers(ModelSettings(language=NoLanguage(), seed="0")), prompt_of(1)
    fleet.tell(A, blocks_stored(tokens))
    assert fleet.exact.models()[""].state == "off"
    assert "hash seed" in fleet.exact.models()[""].reason
    assert fleet.exact.servers()[A].state == "off"
    assert fleet.held(tokens) == {}


def test_only_the_server_that_names_blocks_in_another_way_is_left_out() -> None:
    fleet, tokens = TwoReportingServers(), prompt_of(1)
    fleet.tell(A, blocks_stored(tokens))
    fleet.tell(B, blocks_stored(tokens, algorithm="sha256_cbor"))
    fleet.route(A, tokens)
    assert fleet.held(tokens).keys() == {A}
    assert [fleet.exact.servers()[name].state for name in (A, B)] == ["following", "off"]


def test_a_server_with_blocks_of_another_size_is_left_out() -> None:
    fleet = TwoReportingServers()
    fleet.tell(A, blocks_stored(prompt_of(1)))
    other = {**blocks_stored(prompt_of(1)), "token_ids": list(range(80 * BLOCK))}
    fleet.tell(B, other)
    assert "blocks of 32 tokens" in fleet.exact.servers()[B].reason


def test_prompts_that_no_event_names_turn_the_model_off_until_one_is_named() -> None:
    fleet = TwoReportingServers()
    fleet.tell(A, blocks_stored(prompt_of(0)))
    for n in range(1, 9):
        fleet.route(A, prompt_of(n))
    fleet.held(prompt_of(1))
    assert fleet.exact.models()[""].state == "checking"
    fleet.held(prompt_of(1), later_s=40)
    status = fleet.exact.models()[""]
    assert (status.state, status.prompts["missed"]) == ("off", 8)
    assert "tokenizer, chat template" in status.reason

    fleet.tell(A, blocks_stored(prompt_of(9)))
    for _ in range(32):  # a share of the prompts is still checked
        fleet.route(A, prompt_of(9))
    fleet.held(prompt_of(9))
    status = fleet.exact.models()[""]
    assert (status.state, status.prompts["matched"]) == ("on", 2)
    assert status.prompts["off"] == 30


def test_misses_at_a_server_that_is_only_partly_known_prove_nothing() -> None:
    fleet = TwoReportingServers()
    fleet.tell(A, blocks_stored(prompt_of(0)), complete=False)
    for n in range(1, 20):
        fleet.route(A, prompt_of(n))
    fleet.held(prompt_of(1), later_s=40)
    assert fleet.exact.models()[""].prompts["missed"] == 0


@pytest.mark.parametrize(("why", "still"), [(Forget.RESTART, set()), (Forget.GAP, {A})])
def test_a_new_process_holds_no_blocks_and_a_gap_removes_none(why: Forget, still: set[EndpointName]) -> None:
    fleet, tokens = TwoReportingServers(), prompt_of(1)
    fleet.tell(A, blocks_stored(tokens))
    fleet.route(A, tokens)
    assert fleet.held(tokens).keys() == {A}
    fleet.exact.apply(A, [why], complete=False, now=next(fleet.clock))
    assert fleet.held(tokens).keys() == still
    server = fleet.exact.servers()[A]
    assert (server.state, server.blocks) == ("partly", 0)


def test_a_server_with_too_many_blocks_is_off_and_names_the_setting() -> None:
    fleet = TwoReportingServers(max_blocks=60)
    fleet.tell(A, blocks_stored(prompt_of(1)))
    fleet.tell(B, blocks_stored(prompt_of(2)))
    assert fleet.exact.servers()[A].state == "following"
    assert "raise exactMode.maxBlocks" in fleet.exact.servers()[B].reason
    check_exact(fleet.exact)


def test_a_server_that_names_too_many_blocks_does_not_turn_the_others_off() -> None:
    fleet = TwoReportingServers(max_blocks=60)
    fleet.tell(A, blocks_stored(prompt_of(1)))
    few = {"type": "BlockStored", "block_hashes": [], "token_ids": [], "block_size": 16}
    held = fleet.exact.servers()[A].blocks
    fleet.tell(A, {**few, "block_hashes": list(range(59 - held))})
    fleet.tell(B, {**few, "block_hashes": [1000, 1001, 1002]})
    assert fleet.exact.servers()[B].state == "following"
    assert "raise exactMode.maxBlocks" in fleet.exact.servers()[A].reason
    check_exact(fleet.exact)


def test_prompts_that_cannot_be_followed_are_counted_by_reason() -> None:
    fleet = TwoReportingServers()
    fleet.tell(A, blocks_stored(prompt_of(0)))
    fleet.route(A, prompt_of(1), adapter="sql")
    assert fleet.exact.models()[""].prompts == {"mapped": 0, "matched": 0, "missed": 0, "adapter": 1}
    only_other = Exact({"other": NO_TOKENIZER}, max_blocks=1000, max_chunks=1000)
    only_other.add(A, model="mine")
    assert only_other.models()["mine"].state == "off"
    assert "exactMode.models" in only_other.models()["mine"].reason


def test_a_chunk_is_held_while_any_tier_has_its_blocks() -> None:
    fleet, tokens = TwoReportingServers(), prompt_of(1)
    whole = len(fleet.chain(tokens))
    fleet.tell(A, blocks_stored(tokens), blocks_stored(tokens, medium="CPU"))
    fleet.route(A, tokens)
    assert fleet.held(tokens) == {A: whole}
    fleet.tell(A, blocks_removed(tokens, first=20))  # half of the prompt is only on the CPU
    assert fleet.held(tokens) == {A: whole}
    fleet.tell(A, blocks_stored(tokens, medium="STORAGE"), blocks_removed(tokens, medium="CPU"))
    assert fleet.held(tokens) == {A: whole}
    fleet.tell(A, blocks_removed(tokens), blocks_removed(tokens, medium="STORAGE"))
    assert fleet.held(tokens, later_s=100) == {}


def test_the_model_of_the_last_dropped_server_is_forgotten() -> None:
    fleet = TwoReportingServers()
    fleet.exact.drop(A)
    assert fleet.exact.models().keys() == {""}
    fleet.exact.drop(B)
    assert fleet.exact.models() == {}
    check_exact(fleet.exact)


def test_parts_of_blocks_and_sliding_windows_decide_no_algorithm() -> None:
    fleet, tokens = TwoReportingServers(), prompt_of(1)
    fleet.tell(A, {**blocks_stored(tokens), "token_ids": [1]})
    fleet.tell(A, {**blocks_stored(tokens), "token_ids": tokens[:-1]})
    fleet.tell(
        A,
        {
            **blocks_stored(prompt_of(2, blocks=20)),
            "block_hashes": [1] * 40,
            "kv_cache_spec_kind": "sliding_window",
        },
    )
    assert fleet.exact.models()[""].state == "waiting"
    fleet.tell(A, blocks_stored(tokens))
    assert (fleet.exact.models()[""].state, fleet.exact.models()[""].block_tokens) == ("checking", BLOCK)
    assert fleet.exact.servers()[A].state == "following"


def test_an_unexpected_error_costs_only_the_prompt_that_caused_it() -> None:
    fleet, tokens = TwoReportingServers(), prompt_of(1)
    fleet.tell(A, blocks_stored(tokens))
    text = InferenceRequest(kind=ApiKind.COMPLETIONS, prompt=b"words " * 100)
    routed = RoutedPrompt(
        server=A,
        adapter="",
        inference=text,
        chain=hash_chain(text.prompt, seed=1, schedule=SCHEDULE),
        schedule=SCHEDULE,
    )
    fleet.exact.routed(routed, now=next(fleet.clock))
    fleet.route(A, tokens)
    assert fleet.held(tokens).keys() == {A}
    status = fleet.exact.models()[""]
    assert (status.state, status.prompts["error"]) == ("on", 1)
    assert "words" not in repr(status) + fleet.exact.last_error, "the page and the log show no prompt"
    assert fleet.exact.last_error.startswith("ZeroDivisionError")
