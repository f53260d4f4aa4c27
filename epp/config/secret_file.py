"""Reads the files that hold a secret of the pool: the hash secret, or the key that signs messages."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from epp.errors import ConfigError

_SHORTEST_BYTES: Final = 16


def read_secret(path: str, *, field: str) -> bytes:
    """Return the secret in a file. A ConfigError names `field` if the file cannot be read or is too short."""
    try:
        secret = Path(path).read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"{field}: {path}: {error.strerror}") from error
    if len(secret) < _SHORTEST_BYTES:
        raise ConfigError(
            f"{field}: {path}: holds {len(secret)} bytes; a secret that nobody can guess needs "
            f"{_SHORTEST_BYTES} or more"
        )
    return secret
