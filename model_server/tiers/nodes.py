"""The tree of stored prefixes. Each node is a run of blocks, and the block hashes of the engine and vLLM name
the blocks.

A block hash names its whole prefix, so two nodes never hold the same block. A node follows any block of its
parent: a new prefix that leaves a node in its middle gets a node behind the last common block, and the node
that it left stays whole.

Invariants (`check_integrity`): a block is in the tree only if all blocks before it are; no block is in two
nodes; nodes are not empty. This module does no I/O. Caller: the prefix store, which makes the same changes on
disk.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from model_server.core.hashing import BlockHash


@dataclass(eq=False, slots=True)
class Node:
    hashes: tuple[BlockHash, ...]
    first_block: int
    """The number of blocks before the node's own."""
    parent: Node | None
    children: dict[BlockHash, Node] = field(default_factory=dict)

    @property
    def name(self) -> BlockHash:
        return self.hashes[0]

    @property
    def parent_hash(self) -> BlockHash | None:
        """Return the hash of the block before the node's own."""
        if self.parent is None:
            return None
        return self.parent.hashes[self.first_block - self.parent.first_block - 1]


@dataclass(frozen=True, slots=True)
class Match:
    """The first `num_blocks` blocks of a node."""

    node: Node
    num_blocks: int


class PrefixTree:
    def __init__(self) -> None:
        self._nodes: dict[BlockHash, Node] = {}
        self._node_of: dict[BlockHash, Node] = {}
        """The node that holds each block."""

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[Node]:
        return iter(self._nodes.values())

    def find(self, name: BlockHash) -> Node | None:
        return self._nodes.get(name)

    def match(self, hashes: Sequence[BlockHash]) -> list[Match]:
        """Return the part of a prefix that the tree has, from its beginning on."""
        held = hashes[: self.num_held(hashes)]
        return [Match(node, sum(1 for _ in own)) for node, own in groupby(held, self._node_of.__getitem__)]

    def num_held(self, hashes: Sequence[BlockHash]) -> int:
        """Return how many of a prefix's first blocks are in the tree. A block is in the tree only if all
        blocks before it are.
        """
        return bisect_left(hashes, 1, key=lambda block: block not in self._node_of)

    def attach(
        self, hashes: Sequence[BlockHash], *, first_block: int, parent_hash: BlockHash | None
    ) -> Node | None:
        """Add a node behind the block `parent_hash`. Return None if its blocks are in the tree already, or if
        the block before them is not, or has another place.
        """
        parent = self._node_of.get(parent_hash) if parent_hash is not None else None
        before = 0
        if parent is not None and parent_hash is not None:
            before = parent.first_block + parent.hashes.index(parent_hash) + 1
        known = parent is not None or parent_hash is None
        if not known or first_block != before or not self._node_of.keys().isdisjoint(hashes):
            return None
        node = Node(tuple(hashes), first_block, parent)
        if parent is not None:
            parent.children[node.name] = node
        self._nodes[node.name] = node
        self._node_of.update(dict.fromkeys(node.hashes, node))
        return node

    def remove(self, node: Node) -> None:
        """Remove a leaf. Removing a node with children would leave a hole in their prefixes."""
        assert not node.children, "only leaves are removed"
        if node.parent is not None:
            del node.parent.children[node.name]
        del self._nodes[node.name]
        for block in node.hashes:
            del self._node_of[block]

    def check_integrity(self) -> None:
        seen: set[BlockHash] = set()
        for name, node in self._nodes.items():
            assert node.hashes, "a node has blocks"
            assert node.name == name
            assert seen.isdisjoint(node.hashes), "a block is in one node"
            seen.update(node.hashes)
            assert all(self._node_of[block] is node for block in node.hashes)
            assert all(child.parent is node for child in node.children.values())
            if (parent := node.parent) is None:
                assert node.first_block == 0
                continue
            assert self._nodes[parent.name] is parent, "the parent is in the tree"
            assert parent.children[name] is node
            assert 0 < node.first_block - parent.first_block <= len(parent.hashes)
        assert self._node_of.keys() == seen
