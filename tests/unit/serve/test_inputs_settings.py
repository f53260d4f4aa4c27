"""The parts that follow from the configuration alone, and where the hash secret of a process comes from."""

from pathlib import Path
from typing import Any

import pytest

from epp.base.errors import ConfigError
from epp.config.sections import Envoy
from epp.config.settings import Config
from epp.config.sharing import Redis, Sharing
from epp.picker.prefix_index.secret import derived
from epp.protocol.http_events import BodyRoom
from epp.request.parse import API_PATHS
from epp.serve.inputs import hash_secret, stream_settings, write_beside


@pytest.mark.parametrize(
    ("fields", "held", "destinations", "asks_s", "given_s"),
    [
        ({}, True, 1, 0.0, 0.0),
        ({"envoy": Envoy(eds_file="/e")}, True, 8, 60.0, 0.0),
        ({"dialect": "ai-gateway"}, False, 1, 0.0, 0.0),
        ({"dialect": "envoy-gateway", "envoy": Envoy(message_timeout_seconds=7)}, True, 8, 0.0, 7.0),
        ({"envoy": Envoy(fail_open=False)}, False, 1, 0.0, 0.0),
    ],
    ids=["unknown", "own-envoy", "fails-closed", "fixed-time", "not-held"],
)
def test_the_settings_of_streams_follow_the_gateway(
    fields: dict[str, Any], *, held: bool, destinations: int, asks_s: float, given_s: float
) -> None:
    made = stream_settings(Config(**fields), BodyRoom(), traced=False)
    assert (made.hold_streams, made.caller.max_destinations) == (held, destinations)
    assert (made.longest_delay_s, made.given_delay_s) == (asks_s, given_s)


def test_paths_that_are_allowed_are_not_blocked() -> None:
    made = stream_settings(
        Config(blocked_paths=("/metrics", "/version"), allowed_paths=("/version",)), BodyRoom(), traced=False
    )
    assert made.blocked.refuse("/metrics")
    assert not made.blocked.refuse("/version")
    assert made.blocked.open_apis == API_PATHS


def test_the_secret_comes_from_the_file_then_from_the_signing_key(tmp_path: Path) -> None:
    file, key = tmp_path / "secret", tmp_path / "key"
    file.write_bytes(b"of the operator, long enough\n")
    key.write_bytes(b"of the pool, long enough\n")
    redis = Sharing(redis=Redis(url="redis://h", signing_key_file=str(key)))
    secret = hash_secret(Config(hash_secret_file=str(file), sharing=redis), hub=None)
    assert (secret, secret.made_here) == (derived(file.read_bytes().strip()), False)
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
