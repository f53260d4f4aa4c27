from __future__ import annotations

from pathlib import Path

import pytest

from epp.config.settings import Config
from epp.config.sharing import Redis, Sharing
from epp.errors import ConfigError
from epp.picker.server_caches import Roots
from epp.prefix_index.secret import HashSecret, derived
from epp.prefix_index.table import ChunkSchedule
from epp.serve.hash_secret import hash_secret, write_beside

ONE, OTHER = HashSecret(b"1" * 32, made_here=True), HashSecret(b"2" * 32, made_here=True)


def test_a_made_secret_gives_way_to_another_pickers() -> None:
    assert ONE.agreed(OTHER.shown()) == OTHER
    assert ONE.agreed(ONE.shown()) == ONE


@pytest.mark.parametrize("shown", [b"", b"made:", b"made:short", b"made:" + b"x" * 5000, b"given:x", b"\xff"])
def test_what_is_no_secret_is_not_taken(shown: bytes) -> None:
    assert ONE.agreed(shown) is None
    assert derived(b"file").agreed(shown) is None


def test_a_given_secret_never_gives_way_and_is_told_by_a_digest() -> None:
    given = derived(b"file")
    assert given.agreed(given.shown()) == given
    assert given.agreed(ONE.shown()) is None
    assert given.agreed(derived(b"another file").shown()) is None
    assert given.key not in given.shown()


def test_without_the_secret_nobody_can_tell_the_hashes_that_a_picker_uses() -> None:
    schedule = ChunkSchedule()
    seeds = {
        Roots(schedule, secret=s.key).seed(model="m") for s in (ONE, OTHER, derived(b"file"), HashSecret())
    }
    assert len(seeds) == 4
    roots = Roots(schedule, secret=ONE.key)
    assert roots.fingerprint != f"{roots.seed(model=''):016x}", (
        "the fingerprint of a secret is not a hash that the table uses"
    )


def test_the_secret_comes_from_the_file_then_from_the_signing_key(tmp_path: Path) -> None:
    file, key = tmp_path / "secret", tmp_path / "key"
    file.write_bytes(b"of the operator, long enough\n")
    key.write_bytes(b"of the pool, long enough\n")
    redis = Sharing(redis=Redis(url="redis://h", signing_key_file=str(key)))
    assert hash_secret(Config(hash_secret_file=str(file), sharing=redis), hub=None) == derived(
        file.read_bytes().strip()
    )
    assert hash_secret(Config(sharing=redis), hub=None) == derived(key.read_bytes().strip())


def test_otherwise_it_is_made_at_start_once_for_all_workers(tmp_path: Path) -> None:
    made = [hash_secret(Config(), hub=None) for _ in range(2)]
    assert made[0] != made[1]
    write_beside(tmp_path / "hub.sock")
    workers = [hash_secret(Config(), hub=tmp_path / "hub.sock") for _ in range(2)]
    assert workers[0] == workers[1]
    assert all(secret.made_here and len(secret.key) == 32 for secret in (*made, *workers))


@pytest.mark.parametrize("content", [None, b"", b"short"])
def test_a_file_that_cannot_be_used_is_named(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "secret"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match="hashSecretFile"):
        hash_secret(Config(hash_secret_file=str(file)), hub=None)
