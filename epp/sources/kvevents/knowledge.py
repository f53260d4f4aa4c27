"""Knows which parts of the routed chains each server holds: combines KV events with chunks, and returns
findings.

Owns the blocks of each server, the tree of chunks, and the set of servers that hold each chunk. A server
holds a chunk if it holds all blocks of this chunk and of the chunks before. Each change of this, caused by an
event, is a finding. When a chain has just been mapped, it is looked up at every server, and the result is a
finding too. There are no findings about unknown things: prompts that were not mapped, and blocks that a
server stored before its events were followed.

Invariants (`check_integrity`): the record of held chunks agrees with the blocks, except for chunks whose
blocks changed since the last `findings`. The two limits bound everything.

Pure: times are monotonic seconds of the caller. Caller: `exact`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from epp.base.types import EndpointName
from epp.picker.prefix_index.reported import ChainReport, KvReport, LookupReport, ServerReport
from epp.sources.kvevents.block_hashes import BlockName
from epp.sources.kvevents.blocks import ServerBlocks
from epp.sources.kvevents.chunks import ChunkTree, MappedPrompt, Node
from epp.sources.kvevents.decoding import Event


@dataclass(slots=True, eq=False)
class ServerKnowledge:
    """The knowledge about one server."""

    name: EndpointName
    blocks: ServerBlocks
    complete: bool = False
    """Whether the server certainly lacks every block that it is not known to hold."""
    trusted: bool = False
    """Whether the prompts of its model appear in its events under our names."""
    held: set[Node] = field(default_factory=set)
    known_bytes: int = 0
    changed: dict[Node, float] = field(default_factory=dict)
    """Nodes whose blocks came or went, and when this happened last."""
    reported: tuple[bool, int] = (False, 0)
    """The content of the last report: live, bytes."""

    def follow(self, path: Sequence[Node]) -> int:
        """Return the number of leading chunks of the path that the server holds, by its current blocks."""
        depth = 0
        for node in path:
            if not node.known:
                continue
            if node not in self.held:
                if not (self.has_blocks(node) and self.holds_above(node)):
                    break
                self._hold(node)
            depth = node.depth
        return depth

    def gain(self, first: Node) -> list[Node]:
        """Mark a node as held, and all nodes below it that are held now. Return the ends of these chains."""
        ends, waiting = [], [first]
        while waiting:
            node = waiting.pop()
            self._hold(node)
            below = [child for child in node.children if self.has_blocks(child)]
            if below:
                waiting += below
            else:
                ends.append(node)
        return ends

    def release(self, first: Node) -> None:
        """Mark a held node and all held nodes below it as not held."""
        waiting = [first]
        while waiting:
            node = waiting.pop()
            self.held.remove(node)
            self.known_bytes -= node.size_bytes
            waiting += [child for child in node.children if child in self.held]

    def _hold(self, node: Node) -> None:
        node.seen = True
        self.held.add(node)
        self.known_bytes += node.size_bytes

    def has_blocks(self, node: Node) -> bool:
        return node.known and self.blocks.hold(node.blocks)

    def holds_above(self, node: Node) -> bool:
        return node.parent is None or not node.parent.known or node.parent in self.held

    def report(self) -> ServerReport | None:
        """Return the report about the server. None: nothing has changed since the last report."""
        live = self.trusted and (self.complete or len(self.blocks) > 0)
        if self.reported == (live, self.known_bytes):
            return None
        self.reported = (live, self.known_bytes)
        return ServerReport(server=self.name, live=live, known_bytes=self.known_bytes)


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
        """Callers change nothing in them but `complete` and `trusted`."""
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
        before = len(known.blocks)
        self._note(known, known.blocks.apply(event), now=now)
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
        self._note(known, known.blocks.clear(), now=now)
        known.complete = False

    def forget(self, server: EndpointName) -> None:
        """Called when nothing is known about the server any more: neither which blocks it holds nor which it
        lacks.
        """
        known = self.servers[server]
        self._num_blocks -= len(known.blocks)
        _let_all_go(known.blocks)
        known.held.clear()
        known.changed.clear()
        known.known_bytes, known.complete = 0, False

    def _note(self, known: ServerKnowledge, blocks: Iterable[BlockName], *, now: float) -> None:
        users, changed = self.tree.users, known.changed
        for block in blocks:
            for node in users(block):
                changed[node] = now

    # -- prompts ---------------------------------------------------------------------------------------------

    def map(self, prompt: MappedPrompt, *, now: float) -> None:
        """Called when a prompt was routed: look up its chain at every server."""
        for known in self.servers.values():
            self._found += self._settle(known)  # now the chunks marked as held agree with the blocks
        path, changed = self.tree.map(prompt)
        for known in self.servers.values():
            for node in changed:
                if node in known.held:
                    known.release(node)
                known.changed.pop(node, None)
        held = {known.name: depth for known in self.servers.values() if (depth := known.follow(path))}
        for node in self.tree.evict():
            self._forget_node(node)
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

    def _forget_node(self, node: Node) -> None:
        for known in self.servers.values():
            known.changed.pop(node, None)
            if node in known.held:
                known.release(node)

    # -- findings --------------------------------------------------------------------------------------------

    def findings(self) -> list[KvReport]:
        """Return the changes since the last call, in an order in which they can be applied one by one."""
        found, self._found = self._found, []
        for known in self.servers.values():
            found += self._settle(known)
        found += [account for known in self.servers.values() if (account := known.report())]
        return found

    def _settle(self, known: ServerKnowledge) -> Iterator[KvReport]:
        if not known.changed:
            return
        changed = sorted(known.changed.items(), key=lambda item: item[0].depth)
        known.changed.clear()
        for node, at in changed:
            own = known.has_blocks(node)
            if node in known.held:
                if own:
                    continue
                known.release(node)
                yield ChainReport(server=known.name, chain=node.chain(), held=node.depth - 1, at=at)
            elif own and known.holds_above(node):
                for end in known.gain(node):
                    yield ChainReport(server=known.name, chain=end.chain(), held=end.depth, at=at)

    # -- checks ----------------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        self.tree.check_integrity()
        assert self._num_blocks == sum(len(known.blocks) for known in self.servers.values())
        for known in self.servers.values():
            known.blocks.check_integrity()
            assert all(node in self.tree for node in known.held | set(known.changed))
            assert known.known_bytes == sum(node.size_bytes for node in known.held)
            for node in known.held:
                assert node.seen
                assert known.holds_above(node), "a chunk is held without what it continues"
                if not any(above in known.changed for above in _upwards(node)):
                    assert known.has_blocks(node), "held without its blocks"


def _let_all_go(blocks: ServerBlocks) -> None:
    for _ in blocks.clear():
        pass


def _upwards(node: Node | None) -> Iterator[Node]:
    while node is not None:
        yield node
        node = node.parent
