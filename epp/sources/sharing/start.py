"""Makes a picker's sharing from the configuration: over Redis, over the workers' socket, or not at all.
Called by `app`.
"""

from __future__ import annotations

import secrets
from pathlib import Path

from epp.base.errors import ConfigError
from epp.config.named_files import read_file, read_secret
from epp.config.sharing import SIGNING_KEY, Redis, Sharing
from epp.picker.picker import Picker
from epp.sources.keep import Keep
from epp.sources.sharing.exchange import Exchange
from epp.sources.sharing.hub import HubLink
from epp.sources.sharing.link import Link
from epp.sources.sharing.service import SharingService
from epp.sources.sharing.signed import Seal

_SPEAKER_BYTES = 8


def require(settings: Sharing) -> None:
    """Raises ConfigError if the settings need something that is missing: the `redis` package, or a file."""
    if settings.redis is None:
        return
    _redis_link(settings.redis)
    redis, tls = settings.redis, settings.redis.tls
    for field, path in (
        ("passwordFile", redis.password_file),
        ("sentinelPasswordFile", redis.sentinel_password_file),
        ("tls.caFile", tls.ca_file),
        ("tls.certFile", tls.cert_file),
        ("tls.keyFile", tls.key_file),
    ):
        if path:
            read_file(path, field=f"sharing.redis.{field}")


def make(picker: Picker, settings: Sharing, *, hub: Path | None, keep: Keep) -> SharingService | None:
    """Return the sharing of this picker: over Redis if it is configured, so that the workers of all machines
    share in the same way. Otherwise over this machine's hub, if there is one.
    """
    link: Link
    if settings.redis is not None:
        link = _redis_link(settings.redis)
    elif hub is not None:
        link = HubLink(hub)
    else:
        return None
    exchange = Exchange(picker, me=secrets.token_bytes(_SPEAKER_BYTES))
    return SharingService(exchange, link, settings=settings, keep=keep)


def _redis_link(settings: Redis) -> Link:
    try:
        from epp.sources.sharing.redis_link import RedisLink  # noqa: PLC0415 - the package is an extra
    except ModuleNotFoundError as error:
        raise ConfigError(
            "sharing.redis: the redis package is not installed: pip install 'prefix-gateway[redis]'"
        ) from error
    file = settings.signing_key_file
    return RedisLink(settings, seal=Seal(read_secret(file, field=SIGNING_KEY)) if file else None)
