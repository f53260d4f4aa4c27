"""Which sharing a configuration gives a picker, and the faults that are found before it starts."""

import importlib.metadata
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from epp.base.errors import ConfigError
from epp.config.sharing import Redis, RedisTls, Sharing
from epp.sources.keep import Sources
from epp.sources.sharing.batches import LinkError
from epp.sources.sharing.redis_link import RedisLink
from epp.sources.sharing.service import SharingService, make, require
from tests.unit.sources.sharing.pickers import Replica

HUB = Path("/run/hub.sock")


def made(settings: Sharing, *, hub: Path | None = None) -> SharingService | None:
    replica = Replica(1)
    return make(replica.picker, settings, hub=hub, keep=Sources(rng=random.Random(1)).keep)


def test_a_picker_shares_over_redis_or_the_hub_or_not_at_all() -> None:
    assert made(Sharing()) is None
    assert made(Sharing(), hub=HUB) is not None
    assert made(Sharing(redis=Redis(url="redis://h"))) is not None


@pytest.mark.parametrize(
    ("field", "settings"),
    [
        ("passwordFile", {"password_file": "/nowhere"}),
        ("sentinelPasswordFile", {"sentinel_password_file": "/nowhere"}),
        ("signingKeyFile", {"signing_key_file": "/nowhere"}),
        ("tls.caFile", {"tls": RedisTls(ca_file="/nowhere")}),
        ("tls.certFile", {"tls": RedisTls(cert_file="/nowhere")}),
        ("tls.keyFile", {"tls": RedisTls(key_file="/nowhere")}),
    ],
)
def test_a_file_that_is_missing_is_named_with_its_field(field: str, settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"^sharing\.redis\.{field}: /nowhere: No such file"):
        require(Sharing(redis=Redis(url="redis://h", **settings)))


def test_a_short_signing_key_is_refused(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("  short key \n")
    with pytest.raises(ConfigError, match="holds 9 bytes; a secret that nobody can guess needs 16 or more"):
        require(Sharing(redis=Redis(url="redis://h", signing_key_file=str(key))))


def test_the_error_without_the_redis_extra_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "epp.sources.sharing.redis_link", None)
    with pytest.raises(ConfigError, match=r"pip install 'prefix-gateway\[redis\]'"):
        require(Sharing(redis=Redis(url="redis://h")))


@pytest.mark.parametrize("scheme", ["redis", "redis+cluster", "redis+sentinel"])
async def test_an_unreachable_redis_is_one_error_and_costs_no_file_read(
    scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(name: str) -> str:
        pytest.fail(f"{name}'s version is read from its files")

    monkeypatch.setattr(importlib.metadata, "version", read)
    path = "/master" if scheme == "redis+sentinel" else ""
    link = RedisLink(Redis(url=f"{scheme}://127.0.0.1:1{path}"))
    with pytest.raises(LinkError) as failed:
        await link.send(b"")
    assert failed.value.reason == "connection"
