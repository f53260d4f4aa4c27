"""Keeps the prompts that one server has received but has not computed yet.

If the server loses a part of such a prompt meanwhile, it holds the part again after the computation. So the
loss is not reported until then. A prompt is computed when the server holds its last chunk. A prompt that is
not computed in time is given up. If there are too many prompts, the oldest is given up.

Pure. Caller: `knowledge`.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import Final

from epp.sources.kvevents.chunks import Node

_GIVE_UP_S: Final = 600.0
_MAX_PROMPTS: Final = 4096


class PendingPrompts:
    def __init__(self) -> None:
        self._prompts: OrderedDict[Node, tuple[float, Sequence[Node]]] = OrderedDict()
        """For each prompt, by its last chunk: when to give it up, and all its chunks. The newest is last."""
        self._chunks: Counter[Node] = Counter()
        """For each chunk, in how many of these prompts it is."""
        self._lost: set[Node] = set()
        """Losses that were not reported."""

    def __contains__(self, node: Node) -> bool:
        return node in self._chunks

    def expect(self, path: Sequence[Node], *, now: float) -> list[Node]:
        """Called when a prompt was sent to the server. Returns losses to report now, of a prompt that is
        given up for this one.
        """
        if path[-1] not in self._prompts:
            self._chunks.update(path)
        self._prompts[path[-1]] = now + _GIVE_UP_S, path
        self._prompts.move_to_end(path[-1])
        return self.arrived(next(iter(self._prompts))) if len(self._prompts) > _MAX_PROMPTS else []

    def note_loss(self, node: Node) -> None:
        """Remember a loss that is not reported while the chunk is pending."""
        self._lost.add(node)

    def arrived(self, last: Node) -> list[Node]:
        """Called when the prompt with this end was computed, or never will be. Returns its lost chunks that
        are no longer pending.
        """
        found = self._prompts.pop(last, None)
        if found is None:
            return []
        nodes = []
        for node in found[1]:
            self._chunks[node] -= 1
            if not self._chunks[node]:
                del self._chunks[node]
                if node in self._lost:
                    self._lost.remove(node)
                    nodes.append(node)
        return nodes

    def overdue(self, now: float) -> list[Node]:
        """Give up the prompts that are too old. Returns their lost chunks that are no longer pending."""
        nodes = []
        while self._prompts:
            last = next(iter(self._prompts))
            if self._prompts[last][0] > now:
                break
            nodes += self.arrived(last)
        return nodes

    def clear(self) -> list[Node]:
        """Called when no prompt is pending any more. Returns the losses that were not reported."""
        nodes = list(self._lost)
        self._prompts.clear()
        self._chunks.clear()
        self._lost.clear()
        return nodes

    def check_integrity(self) -> None:
        counted = Counter(node for _, path in self._prompts.values() for node in path)
        assert self._chunks == counted
        assert all(node in self._chunks for node in self._lost)
        assert len(self._prompts) <= _MAX_PROMPTS
