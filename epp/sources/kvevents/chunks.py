"""Keeps the routed chains as a tree of chunks, with the blocks of each chunk.

The node of a chunk has the blocks that become complete within this chunk. A block that crosses the end of the
chunk belongs to the next chunk, since its content depends on how the prompt goes on. So a server holds a
chain up to a chunk if it holds the blocks of this node and of all nodes above it. A chunk without a complete
block is held if its parent is held. Before the first whole block nothing is known.

Bounded: chains that were not mapped for the longest time are removed first, from their ends. Pure. Caller:
`knowledge`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from epp.base.types import ChunkHash
from epp.sources.kvevents.block_hashes import BlockName
from epp.sources.kvevents.blocks import ByBlock


@dataclass(slots=True, eq=False)
class Node:
    """One chunk of a chain."""

    chunk: ChunkHash
    parent: Node | None
    depth: int
    """Number of chunks of the chain up to the end of this one."""
    blocks: tuple[BlockName, ...]
    known: bool
    """Whether a whole block ends in this chunk or before."""
    seen: bool = False
    """Whether some server once held its blocks, so that their names are right."""
    children: list[Node] = field(default_factory=list)

    def above(self) -> Iterator[Node]:
        """Yield the chunks before this one, the nearest first."""
        node = self.parent
        while node is not None:
            yield node
            node = node.parent

    def chain(self) -> list[ChunkHash]:
        return [self.chunk, *(node.chunk for node in self.above())][::-1]


@dataclass(frozen=True, slots=True)
class MappedPrompt:
    chain: Sequence[ChunkHash]
    """The leading chunks for which every request with these chunks has the same blocks."""
    blocks: Sequence[BlockName]
    ends_blocks: Sequence[int]
    """How many blocks are complete at the end of each chunk."""


class ChunkTree:
    def __init__(self, *, max_chunks: int) -> None:
        self._max_chunks = max_chunks
        self._nodes: OrderedDict[ChunkHash, Node] = OrderedDict()
        """The nodes that were not mapped for the longest time come first, and a parent after its children, so
        that ends are removed first."""
        self._users = ByBlock[tuple[Node, ...]]()

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[Node]:
        return iter(self._nodes.values())

    def __contains__(self, node: Node) -> bool:
        return self._nodes.get(node.chunk) is node

    def users(self, block: BlockName) -> tuple[Node, ...]:
        """Return the nodes that contain the block. Usually there is one."""
        return self._users.part(block).get(block, ())

    def map(self, prompt: MappedPrompt) -> list[Node]:
        """Return the nodes of the chain."""
        path: list[Node] = []
        parent: Node | None = None
        start = 0
        for chunk, end in zip(prompt.chain, prompt.ends_blocks, strict=True):
            own = tuple(prompt.blocks[start:end])
            node = self._nodes.get(chunk)
            if node is None:
                node = Node(chunk, parent, len(path) + 1, own, known=end > 0)
                self._add(node)
            elif node.parent is not parent:
                break  # two prefixes with the same hash: the first one keeps its node
            elif node.blocks != own or node.known != (end > 0):
                self._release(node)
                node.blocks, node.known, node.seen = own, end > 0, False
                self._use(node)
                if node.known:
                    _make_known(node.children)
            path.append(node)
            parent, start = node, end
        for node in reversed(path):
            self._nodes.move_to_end(node.chunk)
        return path

    def evict(self) -> None:
        """Bring the tree back into its bound."""
        while len(self._nodes) > self._max_chunks:
            _, node = self._nodes.popitem(last=False)
            assert not node.children, "an end goes before what it continues"
            self._release(node)
            if node.parent is not None:
                node.parent.children.remove(node)

    def _add(self, node: Node) -> None:
        self._nodes[node.chunk] = node
        if node.parent is not None:
            node.parent.children.append(node)
        self._use(node)

    def _use(self, node: Node) -> None:
        for block in node.blocks:
            users = self._users.part(block)
            users[block] = (*users.get(block, ()), node)

    def _release(self, node: Node) -> None:
        for block in node.blocks:
            users = self._users.part(block)
            left = tuple([user for user in users[block] if user is not node])
            if left:
                users[block] = left
            else:
                users.pop(block, None)

    def check_integrity(self) -> None:
        order = {chunk: n for n, chunk in enumerate(self._nodes)}
        used: dict[BlockName, set[Node]] = {}
        for chunk, node in self._nodes.items():
            assert node.chunk == chunk
            for block in node.blocks:
                used.setdefault(block, set()).add(node)
            assert node.known or not node.blocks
            parent = node.parent
            assert node.depth == (parent.depth + 1 if parent is not None else 1)
            if parent is not None:
                assert parent in self, "a chunk without what it continues"
                assert node in parent.children
                assert order[parent.chunk] > order[chunk], "a prefix would go before its end"
                assert node.known or not parent.known
            assert all(child in self and child.parent is node for child in node.children)
        assert {b: set(nodes) for part in self._users.parts for b, nodes in part.items()} == used


def _make_known(nodes: Sequence[Node]) -> None:
    """Called when a whole block ends before these nodes after all, because another prompt with the same
    chunks has other tokens.
    """
    waiting = [node for node in nodes if not node.known]
    while waiting:
        node = waiting.pop()
        node.known = True
        waiting += [child for child in node.children if not child.known]
