"""The invariants of exact mode (`epp/sources/kvevents`)."""

from collections.abc import Collection

from epp.sources.kvevents.decoding import TIERS, BlockName
from epp.sources.kvevents.exact import _MAX_CHECKS, Exact
from epp.sources.kvevents.knowledge import _BITS, ChunkTree, KnownServer, Node
from epp.sources.kvevents.sequence import Messages


def check_exact(exact: Exact) -> None:
    check_tree(exact.tree)
    for known in exact.known.values():
        _check_known(known)
    assert exact.num_blocks == sum(map(len, exact.known.values()))
    assert exact._models.keys() == {known.model for known in exact.known.values()}
    assert all(len(model.checks) <= _MAX_CHECKS for model in exact._models.values())


def check_tree(tree: ChunkTree) -> None:
    assert len(tree._nodes) <= tree._max_chunks
    order = {chunk: n for n, chunk in enumerate(tree._nodes)}
    used: dict[BlockName, set[Node]] = {}
    for chunk, node in tree._nodes.items():
        assert node.chunk == chunk
        for block in node.blocks:
            used.setdefault(block, set()).add(node)
        if node.parent is not None:
            assert tree._nodes[node.parent.chunk] is node.parent, "a chunk without what it continues"
            assert order[node.parent.chunk] > order[chunk], "a prefix would go before its end"
    assert {b: set(nodes) for part in tree._users.parts for b, nodes in part.items()} == used


def nodes_of(tree: ChunkTree) -> Collection[Node]:
    return tree._nodes.values()


def _check_known(known: KnownServer) -> None:
    assert known._held == sum(map(len, known._copies.parts))
    for part in known._copies.parts:
        assert all(0 < copies < 1 << _BITS * TIERS for copies in part.values())
        assert all(known._copies.part(block) is part for block in part)


def check_sequence(sequence: Messages) -> None:
    assert sequence._next is not None or not sequence.complete
