"""Finds the hash secret of this process. It comes from a file, from the pool's signing key, from the process
that started this one, or from a random generator. `app` calls this module.
"""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Final

from epp.config.named_files import read_secret
from epp.config.settings import Config
from epp.config.sharing import SIGNING_KEY
from epp.picker.prefix_index.secret import KEY_BYTES, HashSecret, derived

BESIDE_HUB: Final = "hash-secret"
"""Name of the file beside the workers' socket. The process that starts the workers writes one secret there
for all of them.
"""


def hash_secret(config: Config, *, hub: Path | None) -> HashSecret:
    """Return the hash secret of this process. Raises ConfigError if the file cannot be used."""
    if config.hash_secret_file:
        return derived(read_secret(config.hash_secret_file, field="hashSecretFile"))
    redis = config.sharing.redis
    if redis is not None and redis.signing_key_file:
        return derived(read_secret(redis.signing_key_file, field=SIGNING_KEY))
    if redis is None and hub is not None and (beside := hub.with_name(BESIDE_HUB)).exists():
        return HashSecret(beside.read_bytes(), made_here=True)
    return HashSecret(secrets.token_bytes(KEY_BYTES), made_here=True)


def write_beside(hub: Path) -> None:
    """Write one secret for all workers that meet at this socket. Only this user may enter the folder."""
    hub.with_name(BESIDE_HUB).write_bytes(secrets.token_bytes(KEY_BYTES))
