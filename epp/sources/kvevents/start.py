"""Makes exact mode from the configuration, or says what is missing.

`app` imports this module only if the configuration asks for exact mode.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING

from epp.base.errors import ConfigError
from epp.base.types import Endpoint
from epp.config.exact import ExactMode, ExactModel
from epp.picker.picker import Picker
from epp.sources.kvevents.exact import Exact, ModelSettings
from epp.sources.kvevents.routed_prompts import RoutedPrompts

if TYPE_CHECKING:
    from epp.sources.kvevents.service import ExactService
    from epp.sources.kvevents.sockets import EventSource

_PACKAGES = ("jinja2", "tokenizers", "zmq")

_MOST_PROMPTS = 1000
"""Most prompts that wait for exact mode. Further prompts are skipped."""
_MOST_PROMPT_BYTES = 64 * 2**20
_MOST_CHUNKS = 100_000
"""Most chunks of routed prompts to follow. A chunk takes about 1 KB of memory."""


def require(settings: ExactMode) -> None:
    """Raises ConfigError if the settings need something that is missing: a package, or a tokenizer."""
    _models(settings)


def make(picker: Picker, settings: ExactMode) -> ExactService:
    """Return the service. It listens to the picker from now on; `run` starts the rest."""
    models = _models(settings)
    prompts = RoutedPrompts(max_prompts=_MOST_PROMPTS, max_bytes=_MOST_PROMPT_BYTES)
    picker.subscribe(prompts.on_event)
    from epp.sources.kvevents.service import ExactService  # noqa: PLC0415 - needs ZeroMQ, which is an extra
    from epp.sources.kvevents.sockets import EventSource  # noqa: PLC0415 - needs ZeroMQ, which is an extra

    def source(endpoint: Endpoint) -> EventSource | None:
        rank = endpoint.rank or 0  # each rank publishes at the ports of rank 0 plus its number
        host = f"[{endpoint.address.host}]" if ":" in endpoint.address.host else endpoint.address.host
        events = endpoint.kv_events or (
            f"tcp://{host}:{settings.events_port + rank}" if settings.events_port else ""
        )
        if not events:
            return None
        replay = endpoint.kv_replay
        if not replay and not endpoint.kv_events and settings.replay_port:
            replay = f"tcp://{host}:{settings.replay_port + rank}"
        return EventSource(endpoint.model, endpoint.incarnation, events, replay)

    def exact() -> Exact:
        return Exact(models, max_blocks=settings.max_blocks, max_chunks=_MOST_CHUNKS)

    return ExactService(picker, prompts, exact, topic=settings.topic, source=source)


def _models(settings: ExactMode) -> dict[str, ModelSettings]:
    for package in _PACKAGES:
        try:
            importlib.import_module(package)
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"exactMode: the package {error.name or package} is not installed: pip install 'prefix-gateway[exact]'"
            ) from error
    return {one.model: _model(one, n) for n, one in enumerate(settings.models)}


def _model(one: ExactModel, n: int) -> ModelSettings:
    from epp.sources.kvevents.language import FolderLanguage  # noqa: PLC0415 - its packages are an extra

    try:
        language = FolderLanguage(
            Path(one.tokenizer_folder),
            template=Path(one.chat_template_file) if one.chat_template_file else None,
            arguments=one.chat_template_arguments,
        )
    except ConfigError as error:
        raise ConfigError(f"exactMode.models[{n}]: {error}") from error
    return ModelSettings(
        language=language,
        seed=one.hash_seed,
        adapters=one.adapters,
    )
