"""The `sharing` section: every form of Redis URL, and the messages for mistakes."""

from __future__ import annotations

from pathlib import Path

import pytest

from epp.base.errors import ConfigError
from epp.config.settings import load_config
from epp.config.sharing import RedisTarget


@pytest.mark.parametrize(
    ("url", "target"),
    [
        ("redis://r", RedisTarget(kind="single", hosts=(("r", 6379),), tls=False)),
        (
            "valkey://10.0.0.1:7000/3",
            RedisTarget(kind="single", hosts=(("10.0.0.1", 7000),), tls=False, database=3),
        ),
        ("rediss://[fd00::1]:7000", RedisTarget(kind="single", hosts=(("fd00::1", 7000),), tls=True)),
        (
            "valkeys+cluster://a:7000,b",
            RedisTarget(kind="cluster", hosts=(("a", 7000), ("b", 6379)), tls=True),
        ),
        (
            "redis+sentinel://a,b:5000/main/2",
            RedisTarget(
                kind="sentinel", hosts=(("a", 26379), ("b", 5000)), tls=False, database=2, master="main"
            ),
        ),
    ],
)
def test_a_url_says_how_redis_is_reached(url: str, target: RedisTarget) -> None:
    assert RedisTarget.parse(url) == target


@pytest.mark.parametrize(
    "url",
    [
        "http://r",
        "redis+ring://r",
        "redis://:secret@r",
        "redis://r?db=secret",
        "redis://a,b",
        "redis://",
        "redis://a:secret",
        "redis://a:0",
        "redis://a/secret",
        "redis+cluster://a/1",
        "redis+sentinel://a",
        "redis+sentinel://a//1",
    ],
)
def test_any_other_url_gets_the_forms_and_is_not_repeated(url: str) -> None:
    with pytest.raises(ValueError, match="write redis://host:6379/0") as caught:
        RedisTarget.parse(url)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("section", "field", "why"),
    [
        ("{redis: {}}", "sharing.redis", "url"),
        ("{redis: {url: 'redis://a', tls: {caFile: ca.pem}}}", "sharing.redis.tls", "rediss"),
        ("{redis: {url: 'rediss://a', tls: {certFile: c.pem}}}", "sharing.redis.tls", "keyFile"),
        (
            "{redis: {url: 'redis://a', sentinelUsername: s}}",
            "sharing.redis.sentinelPasswordFile",
            "no sentinels",
        ),
        ("{pool: 'a b'}", "sharing.pool", "regex"),
        ("{flushIntervalSeconds: 0}", "sharing.flushIntervalSeconds", "0.005"),
    ],
)
def test_a_mistake_in_the_section_names_the_field(tmp_path: Path, section: str, field: str, why: str) -> None:
    file = tmp_path / "epp.yaml"
    file.write_text(f"{{endpointsFile: e, sharing: {section}}}")
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    assert field.split(".", maxsplit=1)[-1] in str(caught.value)
    assert why in str(caught.value)
    assert "secret" not in str(caught.value)
