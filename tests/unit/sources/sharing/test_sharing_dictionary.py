"""Both sides of the dictionary agree on every chain, although the known beginning of a chain is not sent."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.sources.sharing.batches import HASH_BYTES, MOST_NAMES, MalformedBatchError, pack_hashes
from epp.sources.sharing.dictionary import MOST_CHUNKS, MOST_HASHES, ListenerDictionary, SpeakerDictionary

CHAINS = st.lists(st.lists(st.integers(0, 3), max_size=8).map(tuple), max_size=12)


def hashes(path: Sequence[int]) -> list[int]:
    """Return the hashes of a prompt: each names the whole prompt up to its end."""
    return [1 + hash(tuple(path[: n + 1])) % (2**64 - 1) for n in range(len(path))]


@given(CHAINS)
def test_the_listener_gets_every_chain_as_the_speaker_has_it(paths: list[tuple[int, ...]]) -> None:
    speaker, listener = SpeakerDictionary(), ListenerDictionary()
    for path in paths:
        chain = hashes(path)
        assert listener.chain(*speaker.chain(chain)) == chain


def test_only_the_new_part_of_a_chain_is_sent() -> None:
    speaker = SpeakerDictionary()
    assert speaker.chain([1, 2, 3]) == (b"", pack_hashes([1, 2, 3]))
    assert speaker.chain([1, 2, 3, 4]) == (pack_hashes([3]), pack_hashes([4]))
    assert speaker.chain([1, 2, 9]) == (pack_hashes([2]), pack_hashes([9]))
    assert speaker.chain([1, 2]) == (pack_hashes([2]), b"")
    assert speaker.chain([]) == (b"", b"")


def test_a_name_is_sent_once_for_each_process() -> None:
    speaker, listener = SpeakerDictionary(), ListenerDictionary()
    assert [speaker.name("a", 1), speaker.name("b", 1), speaker.name("a", 1), speaker.name("a", 2)] == [
        0,
        1,
        0,
        2,
    ]
    listener.add_names(speaker.new_names())
    assert speaker.new_names() == []
    assert [listener.name(n) for n in (0, 2, 3, -1)] == [("a", 1), ("a", 2), None, None]


def test_a_chain_whose_head_was_never_sent_is_unknown() -> None:
    listener = ListenerDictionary()
    assert listener.chain(pack_hashes([7]), pack_hashes([8])) is None
    assert listener.chain(b"\x07", b"") is None, "not the size of a hash"


@pytest.mark.parametrize("tail", [b"\1", b"\1" * (HASH_BYTES + 1)])
def test_bytes_that_are_not_hashes_are_refused(tail: bytes) -> None:
    with pytest.raises(MalformedBatchError, match="not a list of hashes"):
        ListenerDictionary().chain(b"", tail)


def test_a_chain_that_leads_back_to_itself_is_unknown_and_ends_the_walk() -> None:
    """A peer could send such a chain: 2 follows 1, and 1 follows 2."""
    listener = ListenerDictionary()
    listener.chain(b"", pack_hashes([1, 2, 1]))
    assert listener.chain(pack_hashes([1]), b"") is None


def test_a_longer_chain_than_allowed_is_cut_and_the_names_are_bounded() -> None:
    listener = ListenerDictionary()
    whole = listener.chain(b"", pack_hashes(range(1, MOST_CHUNKS + 10)))
    assert whole is not None
    assert len(whole) == MOST_CHUNKS
    listener.add_names([("n", 0)] * (MOST_NAMES + 5))
    assert (listener.name(MOST_NAMES - 1), listener.name(MOST_NAMES)) == (("n", 0), None)


def test_a_full_dictionary_is_reported() -> None:
    by_hashes, by_names = SpeakerDictionary(), SpeakerDictionary()
    by_hashes.chain(range(1, MOST_HASHES + 1))
    assert not by_hashes.full
    by_hashes.chain([MOST_HASHES + 1])
    assert by_hashes.full
    for n in range(MOST_NAMES // 2 + 1):
        assert not by_names.full
        by_names.name(f"n{n}", 0)
    assert by_names.full
