"""The disk tier: a folder with a full copy of every prefix node's KV, one segment file each, under a size limit.

    manifest.json     whose KV this is; another model, type or layout is refused
    <first block's hash>.kv

The tree of prefixes is not written down: each segment says where it belongs. So there is nothing that could disagree with the
files after a crash: a segment whose parent is gone, or whose blocks another one has already (a split that was cut off between
its two writes), is dropped when the folder is opened, and so is whatever is damaged.

One process at a time has the folder (flock); its threads may read, put and reorder together. Writers wait for each other, and
nobody who looks something up waits for a file to be written. A reader keeps the segment it was given, whatever replaces it.
Where room is wanted the leaf goes that was used longest ago.

Invariants (`check_integrity`): the files are exactly the tree's nodes; their sizes add up, and stay under the limit.
Callers: the tiered reader, whoever computes prefixes, the background reordering.
"""

from __future__ import annotations

import fcntl
import json
import os
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from model_server.core.hashing import BlockHash, PrefixScope
from model_server.tiers import segment
from model_server.tiers.disk import Disk
from model_server.tiers.errors import DamagedSegmentError, LayoutMismatchError, StoreError
from model_server.tiers.events import PLAIN, Tell, TierRemoved, TierStored, to_nobody
from model_server.tiers.layout import TokenOrder
from model_server.tiers.nodes import Match, Node, PrefixTree
from model_server.tiers.segment import KvLayout, LayerRecords, Place, Segment

_MANIFEST = "manifest.json"
_FORMAT = 1


class PrefixStore:
    def __init__(
        self,
        folder: Path,
        layout: KvLayout,
        *,
        capacity_bytes: int,
        disk: Disk | None = None,
    ) -> None:
        """LayoutMismatchError: the folder belongs to another model. StoreError: to another process, or cannot be read."""
        self.layout = layout
        self.disk = disk or Disk()
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self.tell: Tell = to_nobody
        """Hears of blocks that come and go, in that order."""
        self.folder = folder
        self._writing = threading.RLock()
        """Held by who changes the tree, around `_lock`."""
        self._lock = threading.RLock()
        """Held while the tree is read or changed, never while a file is written."""
        self._tree = PrefixTree()
        self._segments: dict[BlockHash, Segment] = {}
        self._last_use: dict[BlockHash, int] = {}
        self._now = 0
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # it says what prompts were
        self._lock_file = _locked(folder / "lock")
        try:
            _check_manifest(folder / _MANIFEST, layout)
            self._open_segments()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Segments that readers still have stay readable."""
        with self._lock:
            self._segments.clear()
            if self._lock_file >= 0:
                os.close(self._lock_file)
                self._lock_file = -1

    def match(self, hashes: Sequence[BlockHash]) -> list[tuple[Segment, int]]:
        """What is stored of a prefix: segments from its beginning, and how many blocks of each are the prefix's."""
        with self._lock:
            found = self._tree.match(hashes)
            self._touch(found)
            return [(self._segments[match.node.name], match.num_blocks) for match in found]

    def num_held(self, hashes: Sequence[BlockHash]) -> int:
        """How many of a prefix's first blocks are stored. A hint: nobody is waited for, and it may be over in a moment."""
        return self._tree.num_held(hashes)

    def put(
        self,
        hashes: Sequence[BlockHash],
        layers: Sequence[LayerRecords],
        *,
        first_block: int = 0,
        token_ids: Sequence[int] = (),
        scope: PrefixScope = PLAIN,
    ) -> int:
        """Store a prefix of full blocks, as far as it is not there. Gives how many blocks are new.

        `layers`: the records of all its tokens from block `first_block` on; where the store does not have what stands before,
        nothing is stored. `token_ids` (from there on, too) and `scope` are for those who are told. StoreError: they are of another shape, or more than the store can hold. OSError: of the disk; what
        was there is there.
        """
        self._check_shape(hashes, layers, first_block=first_block)
        with self._writing:
            with self._lock:
                found = self._tree.match(hashes)
                self._touch(found)
                covered = sum(match.num_blocks for match in found)
                if covered == len(hashes) or covered < first_block:
                    return 0
                num_tokens = (len(hashes) - covered) * self.layout.block_tokens
                self._make_room(self._size_bytes(num_tokens), keep={match.node.name for match in found})
            if found and found[-1].num_blocks < len(found[-1].node.hashes):
                self._split(found[-1].node, found[-1].num_blocks)
            place = Place(tuple(hashes[covered:]), covered, hashes[covered - 1] if covered else None)
            start, end = ((at - first_block) * self.layout.block_tokens for at in (covered, len(hashes)))
            own = [records.part(self.layout, start, end) for records in layers]
            written = self._write(place, own, None)
            with self._lock:
                added = self._tree.insert(hashes).added
                assert added is not None
                self._hold(added.name, written)
                self._touch([Match(added, len(added.hashes))])
                own_tokens = token_ids[start:end]
                self.tell(TierStored("STORAGE", place.hashes, covered, place.parent, own_tokens, scope))
            return len(hashes) - covered

    def reorder(self, old: Segment, orders: Sequence[TokenOrder]) -> Segment | None:
        """Store a node's tokens in another order, without holding up readers. None: the node has changed or is gone."""
        layers = [old.layer(layer) for layer in range(self.layout.num_layers)]
        with self._writing:
            name = old.place.hashes[0]
            if self._segments.get(name) is not old:
                return None
            written = self._write(old.place, layers, orders)
            with self._lock:
                self._hold(name, written)
            return written

    def drop_damaged(self, damaged: Segment) -> None:
        """A reader found bytes that were not written: the node and all that hangs on it goes, to be computed again."""
        with self._writing, self._lock:
            name = damaged.place.hashes[0]
            node = self._tree.find(name)
            if node is not None and self._segments.get(name) is damaged:
                self._remove(node)

    def drop_unreadable(self, segments: Iterable[Segment]) -> None:
        """Read all of these, one of which made trouble, and drop what is damaged. A file that cannot be removed stays behind."""
        for own in segments:
            try:
                own.check_integrity()
            except (DamagedSegmentError, OSError):
                with suppress(OSError):
                    self.drop_damaged(own)

    def find(self, name: BlockHash) -> Segment | None:
        """The segment that begins with this block."""
        with self._lock:
            return self._segments.get(name)

    def segments(self) -> list[Segment]:
        with self._lock:
            return list(self._segments.values())

    def tell_all(self) -> None:
        """Tell of everything that is stored, as if it were stored now."""
        with self._lock:
            for node in sorted(self._tree, key=lambda node: node.first_block):
                place = _place(node)
                self.tell(TierStored("STORAGE", place.hashes, place.first_block, place.parent))

    def check_integrity(self) -> None:
        with self._lock:
            self._tree.check_integrity()
            names = {node.name for node in self._tree}
            assert names == self._segments.keys() == self._last_use.keys()
            files = {path.name for path in self.folder.glob(f"*{segment.SUFFIX}")}
            assert files == {_file_name(name) for name in names}
            for node in self._tree:
                own = self._segments[node.name]
                assert own.place == _place(node), "a segment says where it belongs"
                assert own.size_bytes == self._path(node.name).stat().st_size
            assert self.used_bytes == sum(own.size_bytes for own in self._segments.values())
            assert self.used_bytes <= self.capacity_bytes

    def _open_segments(self) -> None:
        for path in self.folder.glob(f"*{segment.UNFINISHED}"):
            path.unlink()
        opened: list[Segment] = []
        for path in self.folder.glob(f"*{segment.SUFFIX}"):
            try:
                opened.append(Segment(path, self.layout, self.disk))
            except DamagedSegmentError:
                path.unlink()
        for own in sorted(opened, key=lambda own: own.place.first_block):
            place = own.place
            node = self._tree.attach(place.hashes, first_block=place.first_block, parent_hash=place.parent)
            if node is None or own.path.name != _file_name(place.hashes[0]):
                own.path.unlink()
            else:
                self._segments[node.name] = own
                self._last_use[node.name] = 0
                self.used_bytes += own.size_bytes
        self._make_room(0, keep=set())

    def _check_shape(
        self, hashes: Sequence[BlockHash], layers: Sequence[LayerRecords], *, first_block: int
    ) -> None:
        layout, num_tokens = self.layout, (len(hashes) - first_block) * self.layout.block_tokens
        fits = len(layers) == layout.num_layers and all(
            len(records.probe) == num_tokens * layout.probe_bytes
            and len(records.rest) == num_tokens * layout.rest_bytes
            for records in layers
        )
        if not fits or num_tokens <= 0:
            raise StoreError(f"records of {layout.num_layers} layers and {num_tokens} tokens are wanted")
        if num_tokens > 1 << 16:
            raise StoreError(f"a node has at most {1 << 16} tokens, not {num_tokens}")

    def _split(self, node: Node, num_blocks: int) -> None:
        """The tail first: were the head cut short before, the tail's blocks would be nowhere if the process died."""
        old = self._segments[node.name]
        cut = num_blocks * self.layout.block_tokens
        layers = [old.layer(layer) for layer in range(self.layout.num_layers)]
        at, hashes = node.first_block, node.hashes
        parts = (
            (Place(hashes[num_blocks:], at + num_blocks, hashes[num_blocks - 1]), cut, old.num_tokens),
            (Place(hashes[:num_blocks], at, old.place.parent), 0, cut),
        )
        written = []
        try:
            for place, start, end in parts:
                orders = [_order_of_part(order, start, end) for order in old.orders]
                own = [records.part(self.layout, start, end) for records in layers]
                written.append(self._write(place, own, orders))
        except BaseException:
            with suppress(
                OSError
            ):  # the whole node is still there; a tail that stays goes when the store is opened next
                self._path(hashes[num_blocks]).unlink(missing_ok=True)
            raise
        with self._lock:
            tail = self._tree.split(node, num_blocks)
            self._last_use[tail.name] = self._last_use[node.name]
            self._hold(tail.name, written[0])
            self._hold(node.name, written[1])

    def _write(
        self, place: Place, layers: Sequence[LayerRecords], orders: Sequence[TokenOrder] | None
    ) -> Segment:
        path = self._path(place.hashes[0])
        logical = [TokenOrder.logical(len(place.hashes) * self.layout.block_tokens)] * self.layout.num_layers
        segment.write(path, self.layout, place, layers, orders or logical)
        return Segment(path, self.layout, self.disk)

    def _hold(self, name: BlockHash, written: Segment) -> None:
        if (replaced := self._segments.get(name)) is not None:
            self.used_bytes -= replaced.size_bytes
        self._segments[name] = written
        self.used_bytes += written.size_bytes

    def _size_bytes(self, num_tokens: int) -> int:
        """Not under what a segment of so many tokens takes, and the second description that a split adds."""
        layout = self.layout
        blocks = num_tokens // layout.block_tokens
        described = (
            2048
            + 80 * blocks
            + layout.num_layers * (2 * num_tokens + 4 * (layout.num_chunks(num_tokens) + 1))
        )
        return layout.data_bytes(num_tokens) + described + 4096 + 8 * layout.num_layers

    def _make_room(self, num_bytes: int, *, keep: set[BlockHash]) -> None:
        while self.used_bytes + num_bytes > self.capacity_bytes:
            leaves = [node for node in self._tree if not node.children and node.name not in keep]
            if not leaves:
                raise StoreError(
                    f"{num_bytes} bytes do not fit into a store of {self.capacity_bytes}; raise its capacity"
                )
            self._remove(min(leaves, key=lambda node: self._last_use[node.name]))

    def _remove(self, node: Node) -> None:
        for child in list(node.children.values()):
            self._remove(child)
        self._tree.remove(node)
        self.used_bytes -= self._segments.pop(node.name).size_bytes
        del self._last_use[node.name]
        self.tell(TierRemoved("STORAGE", node.hashes))
        self._path(node.name).unlink(missing_ok=True)

    def _touch(self, matches: Sequence[Match]) -> None:
        self._now += 1
        for match in matches:
            self._last_use[match.node.name] = self._now

    def _path(self, name: BlockHash) -> Path:
        return self.folder / _file_name(name)


def _file_name(name: BlockHash) -> str:
    return name.hex() + segment.SUFFIX


def _place(node: Node) -> Place:
    return Place(node.hashes, node.first_block, node.parent.hashes[-1] if node.parent else None)


def _order_of_part(order: TokenOrder, start: int, end: int) -> TokenOrder:
    """Tokens [start, end) in the sequence in which they were stored."""
    return TokenOrder.of_stored([token - start for token in order.stored() if start <= token < end])


def _locked(path: Path) -> int:
    number = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(number)
        raise StoreError(
            f"{path.parent} is in use by another process; give each server a folder of its own"
        ) from error
    return number


def _check_manifest(path: Path, layout: KvLayout) -> None:
    wanted = {"format": _FORMAT, **asdict(layout)}
    if not path.exists():
        if any(path.parent.glob(f"*{segment.SUFFIX}")):
            raise StoreError(f"{path.parent} has segments and no {_MANIFEST}; remove the folder")
        unfinished = path.with_name(_MANIFEST + segment.UNFINISHED)
        with unfinished.open("w") as file:
            json.dump(wanted, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        unfinished.rename(path)
        segment.sync_folder(path.parent)
        return
    try:
        there = json.loads(path.read_bytes())
    except ValueError as error:
        raise StoreError(f"{path} cannot be read; remove the folder, it is only a cache") from error
    if there != wanted:
        differing = {
            name for name in wanted if not isinstance(there, dict) or there.get(name) != wanted[name]
        }
        raise LayoutMismatchError(
            f"{path.parent} holds KV with another {', '.join(sorted(differing)) or 'manifest'}; give another folder"
        )
