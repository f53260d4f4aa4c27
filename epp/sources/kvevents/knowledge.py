"""Knows the blocks of each server, and the routed chains as a tree of chunks.

The node of a chunk has the blocks that become complete within this chunk. A block that crosses the end of the
chunk belongs to the next chunk, since its content depends on how the prompt goes on. So a server holds a
chain up to a chunk if it holds the blocks of this node and of all nodes above it. Before the first whole
block nothing is known.

Pure: times are monotonic seconds of the caller. The number of chunks is bounded here, and the number of
blocks by the caller, `exact`.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from epp.base.types import ChunkHash
from epp.sources.kvevents.decoding import BlockName, Removed, Stored

_BITS: Final = 10
"""Bits of each tier's count. With usual counts the integer is small, and Python shares small integers."""
_MOST: Final = (1 << _BITS) - 1
_V = TypeVar("_V")
_PARTS: Final = 64
_SHIFT: Final = 64 - _PARTS.bit_length() + 1
_ODD: Final = secrets.randbits(63) << 1 | 1


class ByBlock(Generic[_V]):
    """A dictionary by block names that grows in small steps.

    A full Python dictionary moves all its entries to a table twice as large, in one step. This takes 50 ms
    for 700,000 blocks and 160 ms for 1.4 million, and nothing else of the process runs meanwhile. So blocks
    are spread over many small dictionaries. Servers choose the names of blocks, so a secret number decides
    which name goes where.
    """

    __slots__ = ("parts",)

    def __init__(self) -> None:
        self.parts: Final[list[dict[BlockName, _V]]] = [{} for _ in range(_PARTS)]

    def part(self, block: BlockName) -> dict[BlockName, _V]:
        """Return the dictionary in which the block is, if it is in any."""
        return self.parts[(block * _ODD >> _SHIFT) & (_PARTS - 1)]


@dataclass(slots=True, eq=False)
class Node:
    """One chunk of a chain."""

    chunk: ChunkHash
    parent: Node | None
    blocks: tuple[BlockName, ...] = ()

    def chain(self) -> list[ChunkHash]:
        chain, node = [self.chunk], self.parent
        while node is not None:
            chain.append(node.chunk)
            node = node.parent
        return chain[::-1]


@dataclass(frozen=True, slots=True)
class MappedPrompt:
    chain: Sequence[ChunkHash]
    """The leading chunks for which every request with these chunks has the same blocks."""
    blocks: Sequence[BlockName]
    ends_blocks: Sequence[int]
    """How many blocks are complete at the end of each chunk."""


class ChunkTree:
    """The chunks of the routed chains. Those that were not mapped for the longest time are removed first, and
    the ends of their chains before what comes before.
    """

    def __init__(self, *, max_chunks: int) -> None:
        self._max_chunks = max_chunks
        self._nodes: OrderedDict[ChunkHash, Node] = OrderedDict()
        """In the order in which they are removed: a parent comes after its children."""
        self._users = ByBlock[tuple[Node, ...]]()

    def users(self, block: BlockName) -> tuple[Node, ...]:
        """Return the nodes that contain the block. Usually there is one."""
        return self._users.part(block).get(block, ())

    def map(self, prompt: MappedPrompt) -> list[Node]:
        """Return the nodes of the chain."""
        path: list[Node] = []
        parent: Node | None = None
        start = 0
        for chunk, end in zip(prompt.chain, prompt.ends_blocks, strict=True):
            node = self._nodes.get(chunk)
            if node is None:
                node = self._nodes[chunk] = Node(chunk, parent)
            elif node.parent is not parent:
                break  # two prefixes with the same hash: the first one keeps its node
            blocks = tuple(prompt.blocks[start:end])
            if node.blocks != blocks:
                self._assign(node, blocks)
            path.append(node)
            parent, start = node, end
        for node in reversed(path):
            self._nodes.move_to_end(node.chunk)
        while len(self._nodes) > self._max_chunks:
            self._assign(self._nodes.popitem(last=False)[1], ())
        return path

    def _assign(self, node: Node, blocks: tuple[BlockName, ...]) -> None:
        for block in node.blocks:
            users = self._users.part(block)
            left = tuple([user for user in users.pop(block, ()) if user is not node])
            if left:
                users[block] = left
        node.blocks = blocks
        for block in blocks:
            users = self._users.part(block)
            users[block] = (*users.get(block, ()), node)


class KnownServer:
    """What is known of one server: the blocks that it holds, by its own events. Copies are counted for each
    tier.

    A server stores equal blocks twice when equal requests run side by side, and sends an event for each copy
    that it removes. A block that moves to a slower tier is stored there before or after it leaves the faster
    tier. So a block is held while any copy of it is held, in whatever tier. Removals of unknown copies (from
    before we listened) are ignored.
    """

    def __init__(self, tree: ChunkTree, *, model: str = "") -> None:
        self.model: Final = model
        self.off = ""
        """Why the server is not followed. Empty: it is followed."""
        self.agreed = False
        """Whether the server names blocks as we do."""
        self.events = 0
        self.complete = False
        """Whether the server certainly lacks every block that it is not known to hold."""
        self._tree = tree
        self._copies = ByBlock[int]()
        """For each block, the counts of its copies in all tiers, in one integer that is never 0."""
        self._held = 0
        self._partial_groups: set[int] = set()
        """Groups of layers that keep only a part of a prompt. Their blocks say nothing about prefixes."""
        self._dropped: dict[Node, float] = {}
        """Nodes that the server held until it dropped one of their blocks, and when this happened last."""

    def __len__(self) -> int:
        return self._held

    def __contains__(self, block: BlockName) -> bool:
        return block in self._copies.part(block)

    def holds(self, node: Node, *, besides: BlockName | None = None) -> bool:
        part = self._copies.part
        return all(block in part(block) for block in node.blocks if block != besides)

    def store(self, event: Stored) -> None:
        if event.partial_attention:
            self._partial_groups.add(event.group)
            return
        shift, part = _BITS * event.tier, self._copies.part
        for block in event.blocks:
            copies = part(block)
            had = copies.get(block, 0)
            if had >> shift & _MOST != _MOST:  # more copies are an error of the sender, and must not overflow
                copies[block] = had + (1 << shift)
                self._held += not had

    def remove(self, event: Removed, *, now: float) -> None:
        if event.group in self._partial_groups:
            return
        shift, part = _BITS * event.tier, self._copies.part
        for block in event.blocks:
            copies = part(block)
            had = copies.get(block, 0)
            if had == 1 << shift:
                del copies[block]
                self._note_gone(block, now=now)
            elif had >> shift & _MOST:
                copies[block] = had - (1 << shift)

    def clear(self, *, now: float) -> None:
        """Let all blocks go, one by one. Freeing a million blocks in one step would hold the interpreter for
        30 ms.
        """
        for copies in self._copies.parts:
            while copies:
                self._note_gone(copies.popitem()[0], now=now)
            copies.clear()

    def _note_gone(self, block: BlockName, *, now: float) -> None:
        self._held -= 1
        for node in self._tree.users(block):
            if node in self._dropped or self.holds(node, besides=block):
                self._dropped[node] = now

    def forget(self) -> None:
        self.clear(now=0.0)
        self._dropped.clear()
        self.complete = False

    def lost(self) -> dict[Node, float]:
        """Return the chunks that were lost since the last call, and when. The loss of a chunk includes those
        below.
        """
        dropped, self._dropped = self._dropped, {}
        lost = {node: at for node, at in dropped.items() if not self.holds(node)}
        below = dict.fromkeys(lost, True)
        """For each node that was looked at, whether it or one above it is lost."""
        for node in lost:
            path, above = [], node.parent
            while above is not None and above not in below:
                path.append(above)
                above = above.parent
            below.update(dict.fromkeys(path, above is not None and below[above]))
        return {node: at for node, at in lost.items() if node.parent is None or not below[node.parent]}
