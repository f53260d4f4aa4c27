"""Reads the files that the configuration names. The error of a file that cannot be used names its field."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from epp.base.errors import ConfigError

_SHORTEST_SECRET_BYTES: Final = 16


def read_file(path: str, *, field: str) -> bytes:
    """Return the content of a file. Raise ConfigError if the file cannot be read."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{field}: {path}: {error.strerror}; correct the path") from error


def read_secret(path: str, *, field: str) -> bytes:
    """Return the secret in a file. Raise ConfigError if it cannot be read, or if it is too short."""
    secret = read_file(path, field=field).strip()
    if len(secret) < _SHORTEST_SECRET_BYTES:
        raise ConfigError(
            f"{field}: {path}: holds {len(secret)} bytes; a secret that nobody can guess needs "
            f"{_SHORTEST_SECRET_BYTES} or more"
        )
    return secret
