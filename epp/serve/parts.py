"""Makes the parts that depend only on the configuration, or on the configuration and the picker. `app`
connects them.
"""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from epp.config.reading import read_secret
from epp.config.sections import Listen
from epp.config.settings import Config
from epp.config.sharing import SIGNING_KEY
from epp.picker.picker import Picker
from epp.picker.prefix_index.secret import KEY_BYTES, HashSecret, derived
from epp.protocol.http_events import BodyRoom
from epp.protocol.settings import StreamSettings
from epp.request.blocked import BlockedPaths

if TYPE_CHECKING:
    from epp.sources.kvevents.service import ExactService  # needs ZeroMQ, which is an extra


BESIDE_HUB: Final = "hash-secret"
"""Name of the file beside the workers' socket. The process that starts the workers writes one secret there
for all of them.
"""


def exact_mode(config: Config, picker: Picker) -> ExactService | None:
    if config.exact_mode is None:
        return None
    from epp.sources.kvevents import service  # noqa: PLC0415 - nothing of exact mode is loaded without it

    return service.make(picker, config.exact_mode)


def listen(config: Config, *, worker: int) -> Listen:
    address = config.listen.addresses(workers=config.workers)[worker]
    return msgspec.structs.replace(config.listen, address=address)


def stream_settings(config: Config, room: BodyRoom, *, traced: bool) -> StreamSettings:
    return StreamSettings(
        max_body_bytes=config.envoy.max_body_bytes,
        room=room,
        blocked=BlockedPaths(config.closed_paths),
        hold_streams=config.holds_streams,
        caller=config.caller,
        conformance_headers=config.conformance_headers,
        retries_once=config.caller.own_config and config.envoy.num_retries == 1,
        mode_override=config.streams.mode_override,
        longest_delay_s=config.asks_for_s,
        given_delay_s=config.gives_s,
        answers_list=config.models.answer_list,
        traced=traced,
    )


def hash_secret(config: Config, *, hub: Path | None) -> HashSecret:
    """Return the hash secret of this process: from a file, from the pool's signing key, from the process that
    started this one, or a random one. Raises ConfigError if the file cannot be used.
    """
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
