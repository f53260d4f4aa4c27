"""Which nodes are reordered, and in which order their tokens are stored then."""

from __future__ import annotations

import pytest

from model_server.tiers.learnt import Learnt
from tests.unit.model_server.tiers.stored_prefixes import LAYOUT, chain

BLOCKS = tuple(chain(range(16)))


def weights(num_blocks: int, *, start: int = 0) -> list[list[float]]:
    """Later tokens are more important."""
    tokens = range(start * LAYOUT.block_tokens, (start + num_blocks) * LAYOUT.block_tokens)
    return [[float(layer + token) for token in tokens] for layer in range(2)]


def fresh() -> Learnt:
    return Learnt(num_layers=2, block_tokens=LAYOUT.block_tokens)


def test_a_node_is_due_after_two_requests_and_at_each_doubling() -> None:
    learnt, due_after = fresh(), []
    for request in range(1, 20):
        learnt.record(BLOCKS, weights(4))
        learnt.check_integrity()
        if (name := learnt.next_due()) is not None:
            assert name == BLOCKS[0]
            assert learnt.orders(BLOCKS) is not None
            due_after.append(request)
        assert learnt.next_due() is None, "a node is due once"
    assert due_after == [2, 4, 8, 16]


def test_a_node_with_other_blocks_starts_without_importance() -> None:
    learnt = fresh()
    learnt.record(BLOCKS[:1], weights(1))
    learnt.record(BLOCKS, weights(4))
    learnt.check_integrity()
    assert learnt.known(BLOCKS[:1]) is None
    again = learnt.known(BLOCKS)
    assert again is not None
    assert again.num_requests == 1
    orders = learnt.orders(BLOCKS)
    assert orders is not None
    assert orders[0].stored() == list(reversed(range(16)))


def test_requests_that_use_the_beginning_of_a_node_count_for_its_beginning() -> None:
    learnt = fresh()
    learnt.record(BLOCKS, weights(4))
    learnt.record(BLOCKS, [[layer + 2.0 for layer in own] for own in weights(2)])
    learnt.check_integrity()
    importance = learnt.known(BLOCKS)
    assert importance is not None
    assert list(importance.means(0)) == [*(token + 1.0 for token in range(8)), *weights(4)[0][8:]]
    assert importance.num_requests == 2
    assert learnt.next_due() == BLOCKS[0]
    with pytest.raises(ValueError, match="2 layers and at most 16 tokens"):
        importance.record(weights(5))


def test_the_importance_of_removed_nodes_is_forgotten() -> None:
    learnt = fresh()
    for _ in range(2):
        learnt.record(BLOCKS[:1], weights(1))
        learnt.record(BLOCKS[1:], weights(3))
    learnt.orders(BLOCKS[1:])
    learnt.keep([BLOCKS[0]])
    learnt.check_integrity()
    assert learnt.known(BLOCKS[1:]) is None
    assert learnt.orders(BLOCKS[1:]) is None
    assert learnt.next_due() == BLOCKS[0]
    assert learnt.next_due() is None
