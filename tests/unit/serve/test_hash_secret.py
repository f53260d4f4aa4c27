"""Where the hash secret of a process comes from."""

from __future__ import annotations

from pathlib import Path

import pytest

from epp.base.errors import ConfigError
from epp.config.settings import Config
from epp.config.sharing import Redis, Sharing
from epp.picker.prefix_index.secret import derived
from epp.serve.hash_secret import hash_secret, write_beside


def test_the_secret_comes_from_the_file_then_from_the_signing_key(tmp_path: Path) -> None:
    file, key = tmp_path / "secret", tmp_path / "key"
    file.write_bytes(b"of the operator, long enough\n")
    key.write_bytes(b"of the pool, long enough\n")
    redis = Sharing(redis=Redis(url="redis://h", signing_key_file=str(key)))
    assert hash_secret(Config(hash_secret_file=str(file), sharing=redis), hub=None) == derived(
        file.read_bytes().strip()
    )
    assert hash_secret(Config(sharing=redis), hub=None) == derived(key.read_bytes().strip())


def test_without_file_or_key_secret_is_made_once_at_start_for_all_workers(tmp_path: Path) -> None:
    made = [hash_secret(Config(), hub=None) for _ in range(2)]
    assert made[0] != made[1]
    write_beside(tmp_path / "hub.sock")
    workers = [hash_secret(Config(), hub=tmp_path / "hub.sock") for _ in range(2)]
    assert workers[0] == workers[1]
    assert all(secret.made_here and len(secret.key) == 32 for secret in (*made, *workers))


@pytest.mark.parametrize("content", [None, b"", b"short"])
def test_the_error_for_an_unusable_file_names_its_field(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "secret"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match="hashSecretFile"):
        hash_secret(Config(hash_secret_file=str(file)), hub=None)


def test_workers_that_share_over_redis_do_not_use_secret_of_their_machine(tmp_path: Path) -> None:
    """The workers of other machines could not know it: all workers then agree on a secret over Redis."""
    write_beside(tmp_path / "hub.sock")
    config = Config(sharing=Sharing(redis=Redis(url="redis://h")))
    workers = [hash_secret(config, hub=tmp_path / "hub.sock") for _ in range(2)]
    assert workers[0] != workers[1]


def test_a_secret_from_a_file_does_not_count_as_made_here(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_bytes(b" sixteen bytes!!! \n")
    secret = hash_secret(Config(hash_secret_file=str(file)), hub=None)
    assert secret == derived(b"sixteen bytes!!!")
    assert not secret.made_here
