"""Defines the `sharing` section of the configuration, and parses its Redis URL.

`epp.config.settings` reads the file. Addresses are in the URL, but secrets are in files,
because `epp check` and the admin pages show the configuration.
"""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Final, Literal

from msgspec import Meta

from epp.config.reading import Strict

SIGNING_KEY: Final = "sharing.redis.signingKeyFile"
_URL: Final = re.compile(r"(?:redis|valkey)(s?)(?:\+(cluster|sentinel))?://([^/@?#]+)(?:/([^@?#]*))?")
_FORMS: Final = (
    "write redis://host:6379/0, redis+cluster://a:6379,b:6379, or redis+sentinel://a:26379,b:26379/MASTER/0, with "
    "rediss for TLS, or valkey; IPv6 in brackets; username and passwordFile are fields, since the URL is shown"
)
"""The answer to every other URL."""

RedisKind = Literal["single", "cluster", "sentinel"]


@dataclass(frozen=True, slots=True)
class RedisTarget:
    """The parts of the URL: one server, the first nodes of a cluster, or the sentinels that know a master."""

    kind: RedisKind
    hosts: tuple[tuple[str, int], ...]
    tls: bool
    database: int = 0
    master: str = ""
    """The name by which the sentinels know the master."""

    @classmethod
    def parse(cls, url: str) -> RedisTarget:
        """Parse a URL. Raise ValueError, which never repeats a part of the URL: it could be a password."""
        found = _URL.fullmatch(url)
        if found is None:
            raise ValueError(_FORMS)
        kind: RedisKind = found[2] or "single"  # type: ignore[assignment]  # the pattern knows no other
        hosts = tuple(_host_and_port(text, kind) for text in found[3].split(","))
        master, path = "", found[4] or ""
        if kind == "sentinel":
            master, _, path = path.partition("/")
        numbered = path.isascii() and path.isdigit() and kind != "cluster"
        if (path and not numbered) or (kind == "sentinel" and not master) or (kind == "single" and hosts[1:]):
            raise ValueError(_FORMS)
        return cls(kind=kind, hosts=hosts, tls=bool(found[1]), database=int(path or 0), master=master)


def _host_and_port(text: str, kind: RedisKind) -> tuple[str, int]:
    try:
        split = urllib.parse.urlsplit(f"//{text}")
        host, port = split.hostname, split.port
    except ValueError:
        host, port = None, None
    if not host or port == 0 or text.endswith(":"):
        raise ValueError(_FORMS)
    return host, port or (26379 if kind == "sentinel" else 6379)


class RedisTls(Strict, frozen=True):
    """TLS settings for `rediss` URLs. The files are read at each connection, so renewed files are used."""

    ca_file: str = ""
    """PEM file with the CA to trust. Empty means the certificate authorities of the system."""
    cert_file: str = ""
    """File with the certificate of the picker, if Redis asks for one. Needs `keyFile`."""
    key_file: str = ""
    """File with the private key of `certFile`."""
    check_hostname: bool = True
    """Whether the certificate of Redis must name the host of the URL. The chain of certificates is always
    verified."""


class Redis(Strict, frozen=True):
    """The server over which the pickers of one pool share: Redis 6.2 or newer, or Valkey."""

    url: str
    """`redis://host:6379/0`, `redis+cluster://a:6379,b:6379`, or `redis+sentinel://a:26379,b:26379/MASTER/0`;
    `rediss` for TLS; `valkey` and `valkeys` mean the same. Write no password here, because the URL is shown
    to operators."""
    username: str = ""
    """Name of an ACL user. Empty means the default user."""
    password_file: str = ""
    """File with the password. The picker reads it at each connection. Empty means that the picker sends no
    password."""
    sentinel_username: str = ""
    """User name for the sentinels."""
    sentinel_password_file: str = ""
    """File with the password for the sentinels."""
    signing_key_file: str = ""
    """File with the signing key of the pool, 16 bytes or more, the same for all pickers of the pool. The
    picker signs its messages with this key, and refuses messages that were not signed with it. The file is
    read at start. Empty means that messages are not signed."""
    tls: RedisTls = RedisTls()


class Sharing(Strict, frozen=True):
    """Pickers share which server holds which prefix, and which requests are in flight on which server."""

    pool: Annotated[str, Meta(pattern="^[A-Za-z0-9._:/-]{1,200}$")] = "default"
    """Pickers with the same pool name share. Pools with different names on one Redis never mix."""
    redis: Redis | None = None
    flush_interval_seconds: Annotated[float, Meta(ge=0.005, le=5)] = 0.05
    """How long the picker collects events before it sends them to the other pickers."""

    def faults(self) -> Iterator[str]:
        """Yield what the types cannot check. Each text begins with the field at fault."""
        if self.redis is None:
            return
        try:
            target = RedisTarget.parse(self.redis.url)
        except ValueError as error:
            yield f"sharing.redis.url: {error}"
            return
        tls = self.redis.tls
        if tls != RedisTls() and not target.tls:
            yield "sharing.redis.tls: the URL is not for TLS; write rediss://, or remove this section"
        if bool(tls.cert_file) != bool(tls.key_file):
            yield "sharing.redis.tls: set both certFile and keyFile, or neither"
        if target.kind != "sentinel" and (self.redis.sentinel_username or self.redis.sentinel_password_file):
            yield "sharing.redis.sentinelPasswordFile: the URL names no sentinels; remove it"
