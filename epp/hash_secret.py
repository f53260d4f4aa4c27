"""Where this process has its hash secret from:
a file, the pool's signing key, the process that started it, or chance. Called by `app`.
"""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Final

from epp.config.settings import Config
from epp.errors import ConfigError
from epp.prefix_index.secret import KEY_BYTES, HashSecret, derived

BESIDE_HUB: Final = "hash-secret"
"""File beside the workers' socket: what the process that started them made for all of them."""
_SHORTEST_BYTES: Final = 16


def hash_secret(config: Config, *, hub: Path | None) -> HashSecret:
    """ConfigError where the file cannot be used."""
    if config.hash_secret_file:
        return derived(_read(config.hash_secret_file))
    redis = config.sharing.redis
    if redis is not None and redis.signing_key_file:
        return derived(Path(redis.signing_key_file).read_bytes().strip())
    if redis is None and hub is not None and (beside := hub.with_name(BESIDE_HUB)).exists():
        return HashSecret(beside.read_bytes(), made_here=True)
    return HashSecret(secrets.token_bytes(KEY_BYTES), made_here=True)


def write_beside(hub: Path) -> None:
    """Make one for all workers that meet there; nobody else may enter the folder."""
    hub.with_name(BESIDE_HUB).write_bytes(secrets.token_bytes(KEY_BYTES))


def _read(path: str) -> bytes:
    try:
        secret = Path(path).read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"hashSecretFile: {path}: {error.strerror}") from error
    if len(secret) < _SHORTEST_BYTES:
        raise ConfigError(
            f"hashSecretFile: {path}: holds {len(secret)} bytes; a secret that nobody guesses has {_SHORTEST_BYTES} or more"
        )
    return secret
