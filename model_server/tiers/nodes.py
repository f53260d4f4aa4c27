"""The radix tree of stored prefixes. Each node is a run of blocks, and the block hashes of the engine and
vLLM name the blocks.

A block hash names its whole prefix, so a node is found by its first block's hash alone, and two nodes never
hold the same block. If a new prefix leaves a node in its middle, the node is split, and the head keeps the
node's name.

Invariants (`check_integrity`): a node's parent ends where the node begins; no block is in two nodes; nodes
are not empty. This module does no I/O. Caller: the prefix store, which makes the same changes on
disk.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from model_server.core.hashing import BlockHash


@dataclass(eq=False, slots=True)
class Node:
    hashes: tuple[BlockHash, ...]
    first_block: int
    """The number of blocks before the node's own."""
    parent: Node | None
    children: dict[BlockHash, Node]

    @property
    def name(self) -> BlockHash:
        return self.hashes[0]

    @property
    def end_block(self) -> int:
        return self.first_block + len(self.hashes)


@dataclass(frozen=True, slots=True)
class Match:
    """The first `num_blocks` blocks of a node."""

    node: Node
    num_blocks: int


class PrefixTree:
    def __init__(self) -> None:
        self._roots: dict[BlockHash, Node] = {}
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
        found: list[Match] = []
        children, at = self._roots, 0
        while at < len(hashes) and (node := children.get(hashes[at])):
            common = _common(node.hashes, hashes, at)
            found.append(Match(node, common))
            at += common
            if common < len(node.hashes):
                break
            children = node.children
        return found

    def num_held(self, hashes: Sequence[BlockHash]) -> int:
        """Return how many of a prefix's first blocks are in the tree. A block is in the tree only if all
        blocks before it are.
        """
        return bisect_left(hashes, 1, key=lambda block: block not in self._node_of)

    def split(self, head: Node, num_blocks: int) -> Node:
        """Split a node, whose head keeps its name. Return its new tail."""
        assert 0 < num_blocks < len(head.hashes)
        tail = Node(head.hashes[num_blocks:], head.first_block + num_blocks, head, head.children)
        for child in tail.children.values():
            child.parent = tail
        head.hashes = head.hashes[:num_blocks]
        head.children = {tail.name: tail}
        self._nodes[tail.name] = tail
        self._node_of.update(dict.fromkeys(tail.hashes, tail))
        return tail

    def attach(
        self, hashes: Sequence[BlockHash], *, first_block: int, parent_hash: BlockHash | None
    ) -> Node | None:
        """Add a node below the node that ends with `parent_hash`. Return None if its blocks are in the tree
        already, or if no node ends there.
        """
        if not self._node_of.keys().isdisjoint(hashes):
            return None
        parent = self._node_of.get(parent_hash) if parent_hash is not None else None
        if parent_hash is not None and (parent is None or parent.hashes[-1] != parent_hash):
            return None
        if first_block != (parent.end_block if parent else 0):
            return None
        return self._add(tuple(hashes), first_block, parent)

    def remove(self, node: Node) -> None:
        """Remove a leaf. Removing a node with children would leave a hole in their prefixes."""
        assert not node.children, "only leaves are removed"
        siblings = node.parent.children if node.parent else self._roots
        del siblings[node.name]
        del self._nodes[node.name]
        for block in node.hashes:
            del self._node_of[block]

    def _add(self, hashes: tuple[BlockHash, ...], first_block: int, parent: Node | None) -> Node:
        node = Node(hashes, first_block, parent, {})
        (parent.children if parent else self._roots)[node.name] = node
        self._nodes[node.name] = node
        self._node_of.update(dict.fromkeys(hashes, node))
        return node

    def check_integrity(self) -> None:
        seen: set[BlockHash] = set()
        for name, node in self._nodes.items():
            assert node.hashes, "a node has blocks"
            assert node.name == name
            assert seen.isdisjoint(node.hashes), "a block is in one node"
            seen.update(node.hashes)
            siblings = node.parent.children if node.parent else self._roots
            assert siblings[name] is node
            assert node.first_block == (node.parent.end_block if node.parent else 0)
            assert all(self._node_of[block] is node for block in node.hashes)
        assert self._node_of.keys() == seen
        linked = list(self._roots.values())
        for node in linked:
            linked.extend(node.children.values())
        assert len(linked) == len(self._nodes), "the tree reaches every node from a root"


def _common(own: Sequence[BlockHash], wanted: Sequence[BlockHash], at: int) -> int:
    """Return the number of leading blocks of `own` that equal the blocks of `wanted` from `at` on."""
    count, most = 0, min(len(own), len(wanted) - at)
    while count < most and own[count] == wanted[at + count]:
        count += 1
    return count
