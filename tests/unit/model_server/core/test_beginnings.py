"""The longest common beginning among cached blocks. The result is that of a scan of all blocks, without
looking at all of them.
"""

from __future__ import annotations

import random
from typing import ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model_server.core.beginnings import Beginnings
from model_server.core.blocks import Block, BlockId
from model_server.core.request import TokenId

_tokens = st.lists(st.integers(0, 2).map(TokenId), min_size=1, max_size=6).map(tuple)


def scan(held: dict[Block, tuple[TokenId, ...]], wanted: tuple[TokenId, ...]) -> int:
    def common(tokens: tuple[TokenId, ...]) -> int:
        return next((i for i, (a, b) in enumerate(zip(tokens, wanted, strict=False)) if a != b), min(len(tokens), len(wanted)))  # fmt: skip

    return max(map(common, held.values()), default=0)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(contents=st.lists(_tokens, max_size=30), wanted=st.lists(_tokens, max_size=10), rng=st.randoms())
def test_the_index_finds_the_longest_common_beginning_as_a_scan_does(
    contents: list[tuple[TokenId, ...]], wanted: list[tuple[TokenId, ...]], rng: random.Random
) -> None:
    index, held = Beginnings(), dict[Block, tuple[TokenId, ...]]()
    for number, tokens in enumerate(contents):
        block = Block(BlockId(number))
        index.add(tokens, block)
        held[block] = tokens
        if rng.random() < 0.3:
            gone = rng.choice(list(held))
            index.remove(held.pop(gone), gone)
        index.check_integrity()
        assert dict(index) == held
    for prompt in wanted:
        common, found = index.longest(prompt)
        assert common == scan(held, prompt)
        assert (found is None) == (common == 0)
        if found is not None:
            assert held[found][:common] == prompt[:common]
            assert held[found] == prompt[:common] or prompt[:common] not in held.values()


class ComparedToken(int):
    """A token that counts how often it is compared."""

    comparisons: ClassVar[int] = 0

    def __eq__(self, other: object) -> bool:
        ComparedToken.comparisons += 1
        return int.__eq__(self, int(other))  # type: ignore[call-overload]  # tokens alone are compared here

    def __lt__(self, other: int) -> bool:
        ComparedToken.comparisons += 1
        return int.__lt__(self, int(other))

    __hash__ = int.__hash__


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["look up", "add"])
def test_sixteen_times_as_many_blocks_take_only_a_few_more_comparisons(kind: str) -> None:
    worst = {}
    for number in (500, 8000):
        rng, index = random.Random(3), Beginnings()

        def block_of(rng: random.Random = rng) -> tuple[TokenId, ...]:
            return tuple(TokenId(ComparedToken(token)) for token in (7, *rng.choices(range(50_000), k=14)))

        for block_id in range(number):
            index.add(block_of(), Block(BlockId(block_id)))
        worst[number] = 0
        for block_id in range(number, number + 50):
            tokens = block_of()
            ComparedToken.comparisons = 0
            if kind == "look up":
                index.longest(tokens)
            else:
                index.add(tokens, Block(BlockId(block_id)))
            worst[number] = max(worst[number], ComparedToken.comparisons)
    print(f"\n{kind}: at most {worst[500]} comparisons of tokens at 500 blocks, {worst[8000]} at 8,000")
    assert worst[500] < 120
    assert worst[8000] <= 1.6 * worst[500]  # a scan takes 16 times as many
