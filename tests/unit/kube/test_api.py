"""The lines of a watch, cut into any pieces by the network."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable

import pytest

from epp.kube.api import lines_of

MIB = 2**20


async def arriving(pieces: Iterable[bytes]) -> AsyncGenerator[bytes]:
    for piece in pieces:
        yield piece


async def lines(*pieces: bytes) -> list[bytes]:
    return [line async for line in lines_of(arriving(pieces))]


@pytest.mark.parametrize("length", [1, 2, 3, 7, 100])
async def test_lines_come_out_whole_wherever_they_are_cut(length: int) -> None:
    text = b"first\n\nsecond line\nthird\nhalf of the fourth"
    pieces = [text[at : at + length] for at in range(0, len(text), length)]
    assert await lines(*pieces) == [b"first", b"second line", b"third"]


async def test_an_object_of_many_pieces_is_not_copied_at_each_of_them() -> None:
    """15 MiB arrive in pieces of a kilobyte, and 30 MiB are copied. A copy at each piece would make 115
    GiB, and the test would time out.
    """
    pieces = [b"x" * 1024] * (15 * 1024)
    (line,) = await lines(*pieces, b"\n")
    assert len(line) == 15 * MIB


async def test_a_line_that_no_object_can_be_is_refused() -> None:
    with pytest.raises(ValueError, match=f"a line has more than {16 * MIB} bytes"):
        await lines(*[b"x" * MIB] * 17)


async def test_the_bound_is_for_one_line_and_not_for_all() -> None:
    assert len(await lines(*[b"x" * MIB, b"\n"] * 20)) == 20
