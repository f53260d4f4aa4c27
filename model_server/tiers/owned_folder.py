"""Reserves the folder of a store for one process, by a lock, and for one model and layout, by a manifest.
Callers: the store, and the server, which asks for the model's fingerprint.
"""

import errno
import fcntl
import json
import os
from dataclasses import asdict
from pathlib import Path

import xxhash

from model_server.tiers import segment
from model_server.tiers.errors import LayoutMismatchError, StoreError
from model_server.tiers.files import write_whole
from model_server.tiers.segment import KvLayout

_NAME = "manifest.json"
_MOST_BYTES = 1 << 16
"""Every manifest that this module writes is shorter than this."""
_FORMAT = 1
_PIECE_BYTES = 1 << 24


def locked(folder: Path) -> int:
    """Take the lock, which lasts as long as the returned file descriptor is open. Raise StoreError if another
    process has the lock.
    """
    number = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(number)
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            raise
        raise StoreError(
            f"{folder} is in use by another process; give each server a folder of its own"
        ) from error
    return number


def check_manifest(folder: Path, layout: KvLayout) -> None:
    """Check the manifest, or write it if there is none. Raise LayoutMismatchError if the folder belongs to
    another model, and StoreError if the manifest cannot be read.
    """
    path = folder / _NAME
    wanted = {"format": _FORMAT, **asdict(layout)}
    if not path.exists():
        if any(folder.glob(f"*{segment.SUFFIX}")):
            raise StoreError(f"{folder} has segments but no {_NAME}; remove the folder")
        write_whole(path, (json.dumps(wanted, indent=1).encode(),))
        return
    try:
        with path.open("rb") as file:
            there = json.loads(file.read(_MOST_BYTES))
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{path} cannot be read; remove the folder, which is only a cache") from error
    if there != wanted:
        differing = {
            name for name in wanted if not isinstance(there, dict) or there.get(name) != wanted[name]
        }
        raise LayoutMismatchError(
            f"{folder} holds KV with another {', '.join(sorted(differing)) or 'manifest'}; give another folder"
        )


def fingerprint(folder: Path) -> str:
    """Return the hash of all files that decide the KV of the model in this folder. Raise StoreError if the
    folder has no weights.
    """
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        raise StoreError(
            f"{folder} has no *.safetensors files, which the KV store needs to distinguish models"
        )
    digest = xxhash.xxh3_128()
    for path in (folder / "config.json", *weights):
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
        with path.open("rb") as file:
            while piece := file.read(_PIECE_BYTES):
                digest.update(piece)
    return digest.hexdigest()
