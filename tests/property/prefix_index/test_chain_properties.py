"""Properties of the chain of any prompt under any schedule."""

import pytest
import xxhash
from hypothesis import example, given
from hypothesis import strategies as st

from epp.config.policy import Chunks
from epp.picker.prefix_index._chain import chain_of
from epp.picker.prefix_index.table import chunks_in, end_bytes
from epp.picker.server_caches import Roots, hash_chain

schedules = st.builds(
    Chunks,
    size_bytes=st.integers(min_value=1, max_value=40),
    later_size_bytes=st.integers(min_value=1, max_value=90),
    later_from_bytes=st.integers(min_value=0, max_value=200),
)
seeds = st.integers(min_value=0, max_value=2**64 - 1)
prompts = st.binary(max_size=600) | st.text(max_size=300).map(lambda text: text.encode())
identities = st.tuples(st.binary(max_size=8), st.text(max_size=8), st.text(max_size=8))


def plain_chain(prompt: bytes, *, seed: int, schedule: Chunks) -> list[int]:
    chain: list[int] = []
    at = 0
    while True:
        size = schedule.size_bytes if at < schedule.later_from_bytes else schedule.later_size_bytes
        if at + size > len(prompt):
            return chain
        seed = xxhash.xxh3_64(prompt[at : at + size], seed=seed).intdigest()
        chain.append(seed)
        at += size


@given(prompt=prompts, seed=seeds, schedule=schedules)
def test_the_chain_equals_the_plain_definition(prompt: bytes, seed: int, schedule: Chunks) -> None:
    assert hash_chain(prompt, seed=seed, schedule=schedule) == plain_chain(
        prompt, seed=seed, schedule=schedule
    )


LONG = st.integers(min_value=241, max_value=2500)


@given(
    prompt=st.binary(min_size=1, max_size=300),
    times=st.integers(min_value=1, max_value=40),
    seed=seeds,
    sizes=st.tuples(LONG, LONG),
    later_from=st.integers(min_value=0, max_value=3000),
)
@example(prompt=b"a", times=4096, seed=0, sizes=(256, 1024), later_from=16384)
@example(prompt=bytes(range(256)), times=200, seed=2**64 - 1, sizes=(256, 1024), later_from=16384)
@example(prompt=b"\xff" * 241, times=1, seed=1, sizes=(241, 1025), later_from=241)
def test_chunks_that_are_hashed_in_c_have_the_hashes_of_xxhash(
    prompt: bytes, times: int, seed: int, sizes: tuple[int, int], later_from: int
) -> None:
    schedule, whole = Chunks(*sizes, later_from), prompt * times
    plain = plain_chain(whole, seed=seed, schedule=schedule)
    assert hash_chain(whole, seed=seed, schedule=schedule) == plain


@pytest.mark.parametrize(
    "wanted", [(240, 1, 241, 0), (241, 3, 241, 0), (241, 1, 241, 2), (241, -1, 241, 0), (241, 0, 240, 0)]
)
def test_missing_chunks_are_not_hashed(wanted: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match="no such chunks"):
        chain_of(bytes(700), 1, *wanted)


@given(prompt=prompts, more=prompts, seed=seeds, schedule=schedules)
def test_the_chain_of_a_prefix_is_a_prefix_of_the_chain(
    prompt: bytes, more: bytes, seed: int, schedule: Chunks
) -> None:
    chain = hash_chain(prompt, seed=seed, schedule=schedule)
    assert hash_chain(prompt + more, seed=seed, schedule=schedule)[: len(chain)] == chain


@given(n_bytes=st.integers(min_value=0, max_value=3000), schedule=schedules)
def test_full_chunks_and_covered_bytes_agree(n_bytes: int, schedule: Chunks) -> None:
    chunks = chunks_in(schedule, n_bytes)
    assert end_bytes(schedule, chunks) <= n_bytes < end_bytes(schedule, chunks + 1)
    assert chunks_in(schedule, end_bytes(schedule, chunks)) == chunks
    assert len(hash_chain(bytes(n_bytes), seed=1, schedule=schedule)) == chunks


@given(prompt=prompts, at=st.integers(min_value=0, max_value=599), schedule=schedules)
def test_004_1_a_changed_byte_changes_every_hash_from_its_chunk_on(
    prompt: bytes, at: int, schedule: Chunks
) -> None:
    chain = hash_chain(prompt, seed=1, schedule=schedule)
    same = chunks_in(schedule, at)
    changed = prompt[:at] + bytes(b ^ 1 for b in prompt[at : at + 1]) + prompt[at + 1 :]
    other = hash_chain(changed, seed=1, schedule=schedule)
    assert len(other) == len(chain)
    assert other[:same] == chain[:same]
    assert not set(other[same:]) & set(chain[same:])


@given(prompt=prompts, one=identities, other=identities)
def test_different_secret_model_or_salt_never_share_a_hash(
    prompt: bytes, one: tuple[bytes, str, str], other: tuple[bytes, str, str]
) -> None:
    schedule = Chunks(size_bytes=8, later_size_bytes=16, later_from_bytes=32)
    chains = []
    for secret, model, salt in (one, other):
        seed = Roots(schedule, secret=secret).seed(model=model, cache_salt=salt)
        chains.append(hash_chain(prompt, seed=seed, schedule=schedule))
    if one == other:
        assert chains[0] == chains[1]
    else:
        assert not set(chains[0]) & set(chains[1])
