"""The picker names blocks as recorded events of vLLM 0.32 do, and as the rule written again here."""

import random

import pytest

from epp.sources.kvevents.decoding import ALGORITHMS, Algorithm, BlockHasher, Stored, decode
from tests.contract.recordings import read_kv_events
from tests.contract.vllm_block_hashes import block_hashes, event_hash


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor"])
def test_every_block_that_vllm_stored_has_the_name_we_compute(algorithm: Algorithm) -> None:
    recording = read_kv_events(algorithm)
    hasher = BlockHasher(algorithm, seed=recording.hash_seed)
    ours: set[int] = set()
    for request in recording.requests:
        adapter = None if request.model == "tiny" else (request.model, request.model)
        ours.update(
            hasher.names(
                request.computed_token_ids,
                block_tokens=recording.block_tokens,
                adapter=adapter,
                cache_salt=request.cache_salt or "",
            )
        )
    stored = {
        block
        for batch in recording.batches
        for event in decode(batch.payload) or ()
        if isinstance(event, Stored)
        for block in event.blocks
    }
    assert stored == ours
    assert len(stored) > 50


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor"])
@pytest.mark.parametrize("seed", ["", "0"])
@pytest.mark.parametrize(("adapter", "salt"), [(None, ""), (("sql", "/a/sql"), ""), (("sql", "sql"), "sql")])
def test_names_follow_vllms_rule(
    algorithm: Algorithm, seed: str, adapter: tuple[str, str] | None, salt: str
) -> None:
    tokens = [random.Random(1).randrange(150_000) for _ in range(70)]
    ours = BlockHasher(algorithm, seed=seed).names(tokens, block_tokens=16, adapter=adapter, cache_salt=salt)
    # The objects are separate in memory, as in a server: pickle treats one object and two equal ones
    # differently.
    apart = (adapter[0].encode().decode(), adapter[1].encode().decode()) if adapter else None
    rule = block_hashes(
        tokens,
        algorithm=algorithm,
        seed=seed or "vllm-none-hash",
        block_tokens=16,
        adapter=apart,
        cache_salt=salt.encode().decode() or None,
    )
    assert ours == [event_hash(h) for h in rule]
    assert len(ours) == 4


def test_algorithms_seeds_adapters_and_salts_never_share_a_name() -> None:
    tokens = list(range(64))
    named = [
        BlockHasher(algorithm, seed=seed).names(tokens, block_tokens=16, adapter=adapter, cache_salt=salt)
        for algorithm in ALGORITHMS
        for seed in ("", "1")
        for adapter in (None, ("a", "p"), ("a", "q"), ("b", "p"))
        for salt in ("", "s")
    ]
    assert len({name for names in named for name in names}) == sum(map(len, named))


def test_a_prompt_without_a_full_block_has_no_names() -> None:
    assert BlockHasher("sha256").names(list(range(15)), block_tokens=16) == []
