"""What was learnt about a store's nodes, beside their segments: a small file a node, kept over a restart.

    <first block's hash>.importance     CRC, a line of JSON (the node's blocks, how many layers), the packed numbers

Written whole under another name and renamed, like a segment, but not synced: what a crash loses is learnt again. Files that are
damaged, or whose node is gone, go when they are read. Callers: the tiered reader.
"""

from __future__ import annotations

import json
import sys
import zlib
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from model_server.core.hashing import BlockHash
from model_server.tiers.importance import NodeImportance
from model_server.tiers.learnt import Blocks
from model_server.tiers.segment import UNFINISHED

SUFFIX = ".importance"
_CRC_BYTES = 4


def save(folder: Path, blocks: Blocks, importance: NodeImportance) -> None:
    """OSError: the disk does not take it."""
    about = {
        "blocks": [block.hex() for block in blocks],
        "num_layers": importance.num_layers,
        "num_tokens": importance.num_tokens,
        "byte_order": sys.byteorder,
    }
    content = json.dumps(about).encode() + b"\n" + importance.packed()
    path = folder / (blocks[0].hex() + SUFFIX)
    unfinished = path.with_name(path.name + UNFINISHED)
    unfinished.write_bytes(zlib.crc32(content).to_bytes(_CRC_BYTES, "big") + content)
    unfinished.rename(path)


def load(folder: Path, *, stored: Collection[BlockHash]) -> list[tuple[Blocks, NodeImportance]]:
    """Of the nodes whose names are in `stored`; other files go."""
    found = []
    for path in folder.glob(f"*{SUFFIX}"):
        try:
            blocks, importance = _read(path)
        except (ValueError, KeyError, TypeError, AssertionError):
            path.unlink()
            continue
        if blocks[0] in stored and path.name == blocks[0].hex() + SUFFIX:
            found.append((blocks, importance))
        else:
            path.unlink()
    return found


def remove(folder: Path, name: BlockHash) -> None:
    """The node is gone. What cannot be removed goes at the next start."""
    with suppress(OSError):
        (folder / (name.hex() + SUFFIX)).unlink()


def _read(path: Path) -> tuple[Blocks, NodeImportance]:
    whole = path.read_bytes()
    checksum, content = whole[:_CRC_BYTES], whole[_CRC_BYTES:]
    if zlib.crc32(content).to_bytes(_CRC_BYTES, "big") != checksum:
        raise ValueError("its content does not fit its checksum")
    text, _, numbers = content.partition(b"\n")
    about = json.loads(text)
    if about["byte_order"] != sys.byteorder:
        raise ValueError("it is of another machine")
    blocks = tuple(BlockHash(bytes.fromhex(block)) for block in about["blocks"])
    importance = NodeImportance.unpacked(
        numbers, num_layers=about["num_layers"], num_tokens=about["num_tokens"]
    )
    importance.check_integrity()
    return blocks, importance
