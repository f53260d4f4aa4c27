"""Whatever bytes arrive, a picker refuses or applies them, and its invariants hold."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epp.sources.sharing.batches import (
    Batch,
    Began,
    Charged,
    HeldChain,
    MalformedError,
    Moved,
    Over,
    Restarted,
    Sized,
    encode,
    encode_table,
)
from tests.unit.picker.picker_questions import text
from tests.unit.sources.sharing.pickers import Replica, meet

numbers = st.integers(-3, 5) | st.integers(-(2**62), 2**62)
heads = st.sampled_from([b"", b"\0" * 8, b"\1" * 8, b"abc"]) | st.binary(max_size=9)
tails = st.sampled_from([b"", b"\1" * 8, b"\1" * 16, b"\1" * 8 + b"\2" * 8, b"\2" * 8 + b"\1" * 8, b"x"])
events = st.one_of(
    st.builds(Began, numbers, numbers, numbers, numbers, numbers, heads, tails),
    st.builds(Moved, numbers, numbers, numbers, numbers, numbers, heads, tails),
    st.builds(Over, numbers, numbers, numbers),
    st.builds(HeldChain, numbers, numbers, heads, tails),
    st.builds(Charged, numbers, numbers),
    st.builds(Restarted, numbers, numbers),
    st.builds(Sized, numbers, numbers, st.none() | st.floats(allow_nan=True)),
)
known_names = Replica(9)
names = st.tuples(st.sampled_from(["a", "b", "zz"]), st.sampled_from([0, 1]) | st.integers(0, 2**32))


def batches(identity: int) -> st.SearchStrategy[Batch]:
    named = st.tuples(st.sampled_from(["a", "b"]), st.just(identity)) | names
    return st.builds(
        Batch,
        speaker=st.sampled_from([b"other", b"third", b""]),
        number=st.integers(0, 6),
        hello=st.integers(0, 2),
        flags=st.integers(0, 31),
        newest=numbers,
        names=st.lists(named, max_size=4),
        events=st.lists(events, max_size=6),
    )


def _identity() -> int:
    from epp.sources.sharing.speaker import identity_of  # noqa: PLC0415

    return identity_of(next(iter(known_names.picker.fleet.states())))


@pytest.mark.slow
@settings(deadline=None)
@given(st.lists(batches(_identity()), max_size=8))
def test_batches_that_no_picker_would_make_break_nothing(made: list[Batch]) -> None:
    replica = Replica(1)
    for n, batch in enumerate(made):
        with contextlib.suppress(MalformedError):
            replica.exchange.receive(encode(batch), now=1.0 + n)
        replica.check()
    with contextlib.suppress(MalformedError):
        for _ in replica.exchange.listener.load(encode_table(list(map(encode, made))), now=20.0, age_s=0.0):
            replica.check()
    replica.exchange.listener.expire(now=100.0)
    replica.check()
    assert replica.in_flight_of_peers() == {}


@settings(deadline=None)
@given(st.binary(max_size=60), st.integers(0, 400), st.integers(0, 7))
def test_damaged_batches_are_refused_or_break_nothing(junk: bytes, at: int, bit: int) -> None:
    one, other = Replica(1), Replica(2)
    meet([one, other], now=0.0)
    one.pick(text("p"), now=1.0)
    said = bytearray(b"".join(one.send(now=1.0)))
    said[at % len(said)] ^= 1 << bit
    for data in (bytes(said), junk, bytes(said[: at % len(said)])):
        with contextlib.suppress(MalformedError):
            other.exchange.receive(data, now=1.1)
        other.check()
