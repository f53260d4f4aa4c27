"""Makes the parts that depend only on the configuration, or on the configuration and the picker. `app`
connects them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from epp.config.listening import Listen
from epp.config.settings import Config
from epp.picker.picker import Picker
from epp.protocol.bodies import BodyRoom
from epp.protocol.stream_settings import StreamSettings
from epp.request.blocked import BlockedPaths

if TYPE_CHECKING:
    from epp.sources.kvevents.service import ExactService  # needs ZeroMQ, which is an extra


def exact_mode(config: Config, picker: Picker) -> ExactService | None:
    if config.exact_mode is None:
        return None
    from epp.sources.kvevents import start  # noqa: PLC0415 - nothing of exact mode is loaded without it

    return start.make(picker, config.exact_mode)


def listen(config: Config, *, worker: int) -> Listen:
    address = config.listen.addresses(workers=config.workers)[worker]
    return msgspec.structs.replace(config.listen, address=address)


def stream_settings(config: Config, room: BodyRoom, *, traced: bool) -> StreamSettings:
    return StreamSettings(
        max_body_bytes=config.envoy.max_body_bytes,
        room=room,
        blocked=BlockedPaths(config.closed_paths),
        hold_streams=config.holds_streams,
        max_destinations=config.caller.max_destinations,
        shows_answers=config.caller.shows_answers,
        conformance_headers=config.conformance_headers,
        scores_metadata=config.scores_metadata,
        cost_metadata=config.cost_metadata,
        retries_once=config.caller.own_config and config.envoy.num_retries == 1,
        mode_override=config.streams.mode_override,
        longest_delay_s=config.asks_for_s,
        given_delay_s=config.gives_s,
        answers_list=config.models.answer_list,
        traced=traced,
    )
