"""Saves what was learned about a store's nodes in a small file beside each node's segment, so that it
survives a restart.

    <first block's hash>.importance     CRC, a line of JSON (the node's blocks, layers), the packed numbers

A file is written whole under another name and renamed, like a segment. It is not synced, because the server
learns again what a crash loses. Files that are damaged, or whose node is gone, are removed when they are
read. Callers: the tiered reader.
"""

from __future__ import annotations

import json
import logging
import sys
import zlib
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from model_server.core.hashing import BlockHash
from model_server.tiers.files import write_whole
from model_server.tiers.importance import NodeImportance
from model_server.tiers.learnt import Blocks
from model_server.tiers.segment import MAX_TOKENS

SUFFIX = ".importance"
_CRC_BYTES = 4

_log = logging.getLogger(__name__)


def save(folder: Path, blocks: Blocks, importance: NodeImportance) -> None:
    """Save the importance of a node. Raise OSError if the disk does not accept the file."""
    about = {
        "blocks": [block.hex() for block in blocks],
        "num_layers": importance.num_layers,
        "num_tokens": importance.num_tokens,
        "byte_order": sys.byteorder,
    }
    content = json.dumps(about).encode() + b"\n" + importance.packed()
    path = folder / (blocks[0].hex() + SUFFIX)
    write_whole(path, (zlib.crc32(content).to_bytes(_CRC_BYTES, "big"), content), synced=False)


def load(
    folder: Path, *, stored: Collection[BlockHash], num_layers: int, block_tokens: int
) -> list[tuple[Blocks, NodeImportance]]:
    """Return the importance of the nodes whose names are in `stored`, in a layout with `num_layers` layers
    and `block_tokens` tokens a block. Other files are removed.
    """
    found = []
    for path in folder.glob(f"*{SUFFIX}"):
        try:
            blocks, importance = _read(path, num_layers=num_layers, block_tokens=block_tokens)
        except (ValueError, KeyError, TypeError, AssertionError, RecursionError):
            _remove(path)
        except OSError as error:
            _log.warning("the importance of a stored prefix cannot be read: %s", error)
        else:
            if blocks[0] in stored:
                found.append((blocks, importance))
            else:
                _remove(path)
    return found


def remove(folder: Path, name: BlockHash) -> None:
    """Remove the file of a node that is gone."""
    _remove(folder / (name.hex() + SUFFIX))


def _remove(path: Path) -> None:
    with suppress(OSError):  # removal is tried again at the next start
        path.unlink()


def _read(path: Path, *, num_layers: int, block_tokens: int) -> tuple[Blocks, NodeImportance]:
    """Read a file. The function never reads more bytes than a node's importance can have."""
    if path.stat().st_size > 4 * MAX_TOKENS * (1 + num_layers) + 80 * MAX_TOKENS // block_tokens + 2048:
        raise ValueError("the file is too long")
    whole = path.read_bytes()
    checksum, content = whole[:_CRC_BYTES], whole[_CRC_BYTES:]
    if zlib.crc32(content).to_bytes(_CRC_BYTES, "big") != checksum:
        raise ValueError("the content does not fit the checksum")
    text, _, numbers = content.partition(b"\n")
    about = json.loads(text)
    if about["byte_order"] != sys.byteorder:
        raise ValueError("another machine wrote the file")
    blocks = tuple(BlockHash(bytes.fromhex(block)) for block in about["blocks"])
    num_tokens = len(blocks) * block_tokens
    if not blocks or (about["num_layers"], about["num_tokens"]) != (num_layers, num_tokens):
        raise ValueError("the file has another layout")
    if path.name != blocks[0].hex() + SUFFIX:
        raise ValueError("the file belongs to another node")
    importance = NodeImportance.unpacked(numbers, num_layers=num_layers, num_tokens=num_tokens)
    importance.check_integrity()
    return blocks, importance
