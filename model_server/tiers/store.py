"""The disk tier is a folder with a full copy of every prefix node's KV. Each node has one segment file. The
folder has a size limit.

    manifest.json     the model and layout of the KV; KV of another model, type or layout is refused
    <first block's hash>.kv

No file holds the tree of prefixes, because each segment names its place in the tree. So after a crash no
index can disagree with the files. When the folder is opened, damaged segments are dropped. So are segments
whose parent is gone, or whose blocks another segment already has.

One process at a time has the folder (flock). Its threads may read, put and reorder together. Writers wait for
each other, and lookups never wait for a file to be written. A reader keeps its segment, even if the segment
is replaced meanwhile. When room is needed, the node that was used longest ago is removed. A use of a node is
also a use of the nodes before it, and of nodes with equal ages the deeper node is removed first. So the
removed node is always a leaf. After a restart, the nodes that were written first count as used first.

Invariants (`check_integrity`): the files are exactly the tree's nodes; their sizes add up, and stay under the
limit; no node was used later than a node before it. Callers: the tiered reader, the writer of computed
prefixes, the reordering.
"""

import os
import threading
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from model_server.core.hashing import BlockHash
from model_server.tiers import owned_folder, segment
from model_server.tiers.errors import DamagedSegmentError, StoreError
from model_server.tiers.files import UNFINISHED, Disk
from model_server.tiers.layout import TokenOrder
from model_server.tiers.nodes import Node, PrefixTree
from model_server.tiers.segment import KvLayout, LayerRecords, Place, Segment


class PrefixStore:
    def __init__(
        self,
        folder: Path,
        layout: KvLayout,
        *,
        capacity_bytes: int,
        disk: Disk | None = None,
    ) -> None:
        """Raise LayoutMismatchError if the folder belongs to another model. Raise StoreError if another
        process has the folder, or it cannot be used.
        """
        self.layout = layout
        self.disk = disk or Disk()
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self.folder = folder
        self._writing = threading.RLock()
        """This lock is held while the tree is changed. A thread that needs both locks takes this lock before
        `_lock`.
        """
        self._lock = threading.RLock()
        """This lock is held while the tree is read or changed, but never while a file is written."""
        self._tree = PrefixTree()
        self._segments: dict[BlockHash, Segment] = {}
        self._last_use: dict[BlockHash, int] = {}
        self._now = 0
        self._lock_file = -1
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # the files reveal prompts
            self._lock_file = owned_folder.locked(folder)
            owned_folder.check_manifest(folder, layout)
            self._open_segments()
        except OSError as error:
            self.close()
            raise StoreError(
                f"{folder} cannot be used for the KV store: {error}; repair or remove the folder, or give another folder"
            ) from error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the store. Segments that readers still have stay readable."""
        with self._lock:
            self._segments.clear()
            if self._lock_file >= 0:
                os.close(self._lock_file)
                self._lock_file = -1

    def match(self, hashes: Sequence[BlockHash]) -> list[tuple[Segment, int]]:
        """Return the stored part of a prefix: segments from its beginning, and how many blocks of each
        segment belong to the prefix.
        """
        with self._lock:
            found = self._tree.match(hashes)
            if found:
                self._touch(found[-1].node)
            return [(self._segments[match.node.name], match.num_blocks) for match in found]

    def num_held(self, hashes: Sequence[BlockHash]) -> int:
        """Return how many of a prefix's first blocks are stored.

        The number is a hint: the call does not wait for a lock, and the store may change at any time.
        """
        return self._tree.num_held(hashes)

    def put(
        self,
        hashes: Sequence[BlockHash],
        layers: Sequence[LayerRecords],
        *,
        first_block: int = 0,
    ) -> int:
        """Store those full blocks of a prefix that are not stored yet. Return the number of new blocks.
        `layers` holds the records of all tokens from block `first_block` on. If the store does not have the
        blocks before `first_block`, nothing is stored. Raise StoreError if the records have
        another shape, or the store cannot hold them. Raise OSError if the disk failed; blocks that were
        stored before are still stored.
        """
        self._check_shape(hashes, layers, first_block=first_block)
        with self._writing:
            with self._lock:
                found = self._tree.match(hashes)
                if found:
                    self._touch(found[-1].node)
                covered = sum(match.num_blocks for match in found)
                if covered == len(hashes) or covered < first_block:
                    return 0
                self._make_room(
                    self._size_bytes(len(hashes) - covered), keep=[match.node.name for match in found]
                )
            parent = hashes[covered - 1] if covered else None
            place = Place(tuple(hashes[covered:]), covered, parent)
            start, end = ((at - first_block) * self.layout.block_tokens for at in (covered, len(hashes)))
            own = [records.part(self.layout, start, end) for records in layers]
            written = self._write(place, own, None)
            with self._lock:
                added = self._tree.attach(place.hashes, first_block=covered, parent_hash=parent)
                assert added is not None, "the blocks before it are in the tree"
                self._hold(added.name, written)
                self._touch(added)
            return len(hashes) - covered

    def reorder(self, old: Segment, orders: Sequence[TokenOrder]) -> Segment | None:
        """Store a node's tokens in another order, without holding up readers. Return None if the node has
        changed or is gone.
        """
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
        """Remove a node in which a reader found changed bytes, and all nodes behind it. Requests will compute
        them again.
        """
        with self._writing, self._lock:
            name = damaged.place.hashes[0]
            node = self._tree.find(name)
            if node is not None and self._segments.get(name) is damaged:
                self._remove(node)

    def drop_unreadable(self, segments: Iterable[Segment]) -> None:
        """Read all these segments, one of which could not be read, and drop the damaged segments.

        A file that cannot be removed stays behind.
        """
        for own in segments:
            try:
                own.check_integrity()
            except (DamagedSegmentError, OSError):
                with suppress(OSError):
                    self.drop_damaged(own)

    def find(self, name: BlockHash) -> Segment | None:
        """Return the segment that begins with this block."""
        with self._lock:
            return self._segments.get(name)

    def segments(self) -> list[Segment]:
        with self._lock:
            return list(self._segments.values())

    def check_integrity(self) -> None:
        # While a file is written, the folder is ahead of the tree.
        with self._writing, self._lock:
            self._tree.check_integrity()
            names = {node.name for node in self._tree}
            assert names == self._segments.keys() == self._last_use.keys()
            self.disk.files.check_integrity()
            files = {path.name for path in self.folder.glob(f"*{segment.SUFFIX}")}
            assert files == {_file_name(name) for name in names}
            for node in self._tree:
                own = self._segments[node.name]
                assert own.place == _place(node), "a segment names its place in the tree"
                assert own.is_there()
                assert node.parent is None or self._last_use[node.parent.name] >= self._last_use[node.name]
            assert self.used_bytes == sum(own.size_bytes for own in self._segments.values())
            assert self.used_bytes <= self.capacity_bytes

    def _open_segments(self) -> None:
        for path in self.folder.glob(f"*{UNFINISHED}"):
            path.unlink()
        opened: list[Segment] = []
        for path in self.folder.glob(f"*{segment.SUFFIX}"):
            try:
                opened.append(Segment(path, self.layout, self.disk))
            except DamagedSegmentError:
                path.unlink()
        for own in sorted(opened, key=lambda own: own.place.first_block):
            place, node = own.place, None
            if own.path.name == _file_name(place.hashes[0]):
                node = self._tree.attach(
                    place.hashes, first_block=place.first_block, parent_hash=place.parent
                )
            if node is None:
                own.path.unlink()
            else:
                self._hold(node.name, own)
        for own in sorted(self._segments.values(), key=lambda own: own.written_ns):
            node = self._tree.find(own.place.hashes[0])
            assert node is not None
            self._touch(node)
        self._make_room(0, keep=())

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
            raise StoreError(f"the records must have {layout.num_layers} layers and {num_tokens} tokens")
        if num_tokens > segment.MAX_TOKENS:
            raise StoreError(f"a node has at most {segment.MAX_TOKENS} tokens, not {num_tokens}")

    def _write(
        self, place: Place, layers: Sequence[LayerRecords], orders: Sequence[TokenOrder] | None
    ) -> Segment:
        """Write the segment. If this fails, the old segment stays, unless its file is gone already."""
        name = place.hashes[0]
        path, before = self._path(name), self._segments.get(name)
        logical = [TokenOrder.logical(len(place.hashes) * self.layout.block_tokens)] * self.layout.num_layers
        try:
            segment.write(path, self.layout, place, layers, orders or logical)
            return Segment(path, self.layout, self.disk)
        except BaseException:
            with suppress(OSError):  # on failure the next opening of the store removes the file
                if before is None:
                    path.unlink(missing_ok=True)
                elif not before.is_there():
                    self.drop_damaged(before)
            raise

    def _hold(self, name: BlockHash, written: Segment) -> None:
        if (replaced := self._segments.get(name)) is not None:
            self.used_bytes -= replaced.size_bytes
        self._segments[name] = written
        self.used_bytes += written.size_bytes
        self._last_use.setdefault(name, 0)

    def _size_bytes(self, num_blocks: int) -> int:
        """Return an upper bound for the bytes of a segment of this many blocks."""
        layout = self.layout
        return layout.data_bytes(num_blocks * layout.block_tokens) + layout.described_bytes(num_blocks)

    def _make_room(self, num_bytes: int, *, keep: Collection[BlockHash]) -> None:
        """Remove old nodes until there is room. Nodes in `keep` were just used and stay. Raise StoreError,
        and remove nothing, if there would not be enough room without all other nodes.
        """
        kept_bytes = sum(self._segments[name].size_bytes for name in keep)
        if kept_bytes + num_bytes > self.capacity_bytes:
            raise StoreError(
                f"{num_bytes} bytes do not fit into a store of {self.capacity_bytes} bytes, {kept_bytes} of which hold "
                "the blocks before them; give the store more room"
            )
        while self.used_bytes + num_bytes > self.capacity_bytes:
            oldest = min(
                (node for node in self._tree if not node.children and node.name not in keep),
                key=lambda node: self._last_use[node.name],
            )
            self._remove(oldest)

    def _remove(self, node: Node) -> None:
        """Remove the node and all nodes behind it. Raise OSError if a file could not be removed. The next
        opening of the store removes the file, or puts the node back.
        """
        failed: OSError | None = None
        gone = [node]
        for one in gone:
            gone.extend(one.children.values())
        for one in reversed(gone):
            self._tree.remove(one)
            self.used_bytes -= self._segments.pop(one.name).size_bytes
            del self._last_use[one.name]
        for one in reversed(gone):
            try:
                self._path(one.name).unlink(missing_ok=True)
            except OSError as error:
                failed = error
        if failed is not None:
            raise failed

    def _touch(self, node: Node) -> None:
        """Record that the node is used now, and so are the nodes before it."""
        self._now += 1
        used: Node | None = node
        while used is not None:
            self._last_use[used.name] = self._now
            used = used.parent

    def _path(self, name: BlockHash) -> Path:
        return self.folder / _file_name(name)


def _file_name(name: BlockHash) -> str:
    return name.hex() + segment.SUFFIX


def _place(node: Node) -> Place:
    return Place(node.hashes, node.first_block, node.parent_hash)
