"""Knows which parts of the routed chains each server holds: combines KV events with chunks, and returns
findings.

Owns the blocks of each server, and the tree of chunks. A server holds a chunk if it holds all blocks of this
chunk and of the chunks before. When a chain has been mapped, it is looked up at every server, and the result
is a finding. When a server drops a block, the loss of each chunk with this block is a finding. There are no
findings about unknown things: prompts that were not mapped, and blocks that a server stored before its events
were followed.

Pure: times are monotonic seconds of the caller. The two limits bound everything. Caller: `exact`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from epp.base.types import EndpointName
from epp.picker.prefix_index.reported import KvReport, LookupReport, LossReport
from epp.sources.kvevents.block_hashes import BlockName
from epp.sources.kvevents.blocks import ServerBlocks
from epp.sources.kvevents.chunks import ChunkTree, MappedPrompt, Node
from epp.sources.kvevents.decoding import Event, Stored


@dataclass(slots=True, eq=False)
class ServerKnowledge:
    """The knowledge about one server."""

    name: EndpointName
    blocks: ServerBlocks
    complete: bool = False
    """Whether the server certainly lacks every block that it is not known to hold."""
    dropped: dict[Node, float] = field(default_factory=dict)
    """Nodes whose blocks the server dropped, and when this happened last."""

    def has_blocks(self, node: Node) -> bool:
        return node.known and self.blocks.hold(node.blocks)

    def follow(self, path: Sequence[Node]) -> int:
        """Return the number of leading chunks of the path that the server holds."""
        depth = 0
        for node in path:
            if node.known:
                if not self.has_blocks(node):
                    break
                node.seen = True
                depth = node.depth
        return depth

    def losses(self) -> Iterator[LossReport]:
        """Yield the chunks that were lost since the last call. The loss of a chunk includes those below."""
        dropped, self.dropped = self.dropped, {}
        lost = {node: at for node, at in dropped.items() if node.seen and not self.has_blocks(node)}
        for node, at in lost.items():
            if not any(above in lost for above in node.above()):
                yield LossReport(server=self.name, chain=node.chain(), at=at)


class OverfullError(Exception):
    """The servers have more blocks than may be remembered. `server` has the most of them."""

    def __init__(self, message: str, *, server: EndpointName) -> None:
        super().__init__(message)
        self.server = server


class Knowledge:
    """max_blocks: the most blocks of all servers together. max_chunks: the most chunks in the tree."""

    def __init__(self, *, max_blocks: int, max_chunks: int) -> None:
        self._max_blocks = max_blocks
        self.tree = ChunkTree(max_chunks=max_chunks)
        """Others only read it."""
        self.servers: dict[EndpointName, ServerKnowledge] = {}
        """Callers change nothing in them but `complete`."""
        self._num_blocks = 0
        self._found: list[KvReport] = []

    # -- servers ---------------------------------------------------------------------------------------------

    def add(self, server: EndpointName) -> None:
        self.servers[server] = ServerKnowledge(server, ServerBlocks())

    def drop(self, server: EndpointName) -> None:
        """Stop following a server. There are no more findings about it."""
        gone = self.servers.pop(server, None)
        if gone is not None:
            self._num_blocks -= len(gone.blocks)
            _let_all_go(gone.blocks)

    def apply(self, server: EndpointName, event: Event, *, now: float) -> None:
        """Apply one event of a server. OverfullError: the bound is exceeded, and the caller must `forget` the
        server that the error names.
        """
        known = self.servers[server]
        before, changed = len(known.blocks), known.blocks.apply(event)
        if isinstance(event, Stored):
            self._note_stored(known, changed)
        else:
            self._note_dropped(known, changed, now=now)
        self._num_blocks += len(known.blocks) - before
        if self._num_blocks > self._max_blocks:
            largest = max(self.servers.values(), key=lambda one: (len(one.blocks), one is known))
            raise OverfullError(
                f"all servers together hold more than {self._max_blocks} blocks, and this one the most",
                server=largest.name,
            )

    def lost(self, server: EndpointName, *, now: float) -> None:
        """Called when the server certainly lost all its blocks, because another process serves now."""
        known = self.servers[server]
        self._num_blocks -= len(known.blocks)
        self._note_dropped(known, known.blocks.clear(), now=now)
        known.complete = False

    def forget(self, server: EndpointName) -> None:
        """Called when nothing is known about the server any more: neither which blocks it holds nor which it
        lacks.
        """
        known = self.servers[server]
        self._num_blocks -= len(known.blocks)
        _let_all_go(known.blocks)
        known.dropped.clear()
        known.complete = False

    def _note_stored(self, known: ServerKnowledge, blocks: Iterable[BlockName]) -> None:
        for block in blocks:
            for node in self.tree.users(block):
                node.seen = node.seen or (node.blocks[-1] == block and known.has_blocks(node))

    def _note_dropped(self, known: ServerKnowledge, blocks: Iterable[BlockName], *, now: float) -> None:
        users, dropped = self.tree.users, known.dropped
        for block in blocks:
            for node in users(block):
                dropped[node] = now

    # -- prompts ---------------------------------------------------------------------------------------------

    def map(self, prompt: MappedPrompt, *, now: float) -> None:
        """Called when a prompt was routed: look up its chain at every server."""
        self._found += self._losses()
        path = self.tree.map(prompt)
        held = {known.name: depth for known in self.servers.values() if (depth := known.follow(path))}
        self.tree.evict()
        unknown = sum(not node.known for node in path)
        seen = next((node.depth - 1 for node in path if node.known and not node.seen), len(path))
        if seen > unknown:
            self._found.append(
                LookupReport(
                    chain=prompt.chain[: len(path)],
                    held=held,
                    sure=frozenset(known.name for known in self.servers.values() if known.complete),
                    from_chunk=unknown,
                    to_chunk=seen,
                    at=now,
                )
            )

    # -- findings --------------------------------------------------------------------------------------------

    def findings(self) -> list[KvReport]:
        """Return the changes since the last call, in an order in which they can be applied one by one."""
        found, self._found = self._found, []
        return found + self._losses()

    def _losses(self) -> list[KvReport]:
        return [loss for known in self.servers.values() for loss in known.losses()]

    # -- checks ----------------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        self.tree.check_integrity()
        assert self._num_blocks == sum(len(known.blocks) for known in self.servers.values())
        for known in self.servers.values():
            known.blocks.check_integrity()


def _let_all_go(blocks: ServerBlocks) -> None:
    for _ in blocks.clear():
        pass
