"""Finds the hash secret of this process. It comes from a file, from the pool's signing key, from the process
that started this one, or from a random generator. `app` calls this module.
"""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Final

from epp.config.settings import Config
from epp.errors import ConfigError
from epp.prefix_index.secret import KEY_BYTES, HashSecret, derived

BESIDE_HUB: Final = "hash-secret"
"""Name of the file beside the workers' socket. The process that starts the workers writes one secret there
for all of them.
"""
_SHORTEST_BYTES: Final = 16


def hash_secret(config: Config, *, hub: Path | None) -> HashSecret:
    """Return the hash secret of this process. Raises ConfigError if the file cannot be used."""
    if config.hash_secret_file:
        return derived(_read(config.hash_secret_file))
    redis = config.sharing.redis
    if redis is not None and redis.signing_key_file:
        return derived(Path(redis.signing_key_file).read_bytes().strip())
    if redis is None and hub is not None and (beside := hub.with_name(BESIDE_HUB)).exists():
        return HashSecret(beside.read_bytes(), made_here=True)
    return HashSecret(secrets.token_bytes(KEY_BYTES), made_here=True)


def write_beside(hub: Path) -> None:
    """Write one secret for all workers that meet at this socket. Only this user may enter the folder."""
    hub.with_name(BESIDE_HUB).write_bytes(secrets.token_bytes(KEY_BYTES))


def _read(path: str) -> bytes:
    try:
        secret = Path(path).read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"hashSecretFile: {path}: {error.strerror}") from error
    if len(secret) < _SHORTEST_BYTES:
        raise ConfigError(
            f"hashSecretFile: {path}: holds {len(secret)} bytes; a secret that nobody can guess needs "
            f"{_SHORTEST_BYTES} or more"
        )
    return secret
