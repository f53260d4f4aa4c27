"""The longest common beginning among cached blocks is found without looking at all of them. Row 000-2's test
compares what is found with a dictionary of prefixes.
"""

from __future__ import annotations

import random
from typing import ClassVar

import pytest

from model_server.core.blocks import Block, BlockId
from model_server.core.partial_cache import Beginnings
from model_server.core.request import TokenId


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
