"""Makes exact mode from the configuration, or says what is missing.

Callers import this module only if the configuration asks for exact mode. The import raises ConfigError if a
package is missing.
"""

from pathlib import Path
from typing import Final

from epp.base.errors import ConfigError
from epp.base.types import Endpoint
from epp.config.sections import ExactMode
from epp.picker.picker import Picker
from epp.sources.kvevents.exact import Exact, ModelSettings
from epp.sources.kvevents.routed_prompts import RoutedPrompts

try:
    from epp.sources.kvevents.language import FolderLanguage
    from epp.sources.kvevents.service import ExactService
    from epp.sources.kvevents.sockets import EventSource
except ModuleNotFoundError as missing:
    raise ConfigError(
        f"exactMode: the package {missing.name} is not installed: pip install 'prefix-gateway[exact]'"
    ) from missing

_MOST_CHUNKS: Final = 100_000
"""Most chunks of routed prompts to follow. A chunk takes about 1 KB of memory."""


def make(picker: Picker, settings: ExactMode) -> ExactService:
    """Return the service. It listens to the picker from now on; `run` starts the rest."""
    models = read_models(settings)
    prompts = RoutedPrompts()
    picker.subscribe(prompts.on_event)

    def source(endpoint: Endpoint) -> EventSource | None:
        rank = endpoint.rank or 0  # each rank publishes at the ports of rank 0 plus its number
        host = f"[{endpoint.address.host}]" if ":" in endpoint.address.host else endpoint.address.host
        events, replay = endpoint.kv_events, endpoint.kv_replay
        if not events and settings.events_port:
            events = f"tcp://{host}:{settings.events_port + rank}"
            replay = f"tcp://{host}:{settings.replay_port + rank}" if settings.replay_port else ""
        return EventSource(endpoint.model, endpoint.incarnation, events, replay) if events else None

    def exact() -> Exact:
        return Exact(models, max_blocks=settings.max_blocks, max_chunks=_MOST_CHUNKS)

    return ExactService(picker, prompts, exact, topic=settings.topic, source=source)


def read_models(settings: ExactMode) -> dict[str, ModelSettings]:
    """Raises ConfigError if a tokenizer or a template is missing or cannot be read."""
    models = {}
    for n, one in enumerate(settings.models):
        try:
            language = FolderLanguage(
                Path(one.tokenizer_folder),
                template=Path(one.chat_template_file) if one.chat_template_file else None,
                arguments=one.chat_template_arguments,
            )
        except ConfigError as error:
            raise ConfigError(f"exactMode.models[{n}]: {error}") from error
        models[one.model] = ModelSettings(language=language, seed=one.hash_seed, adapters=one.adapters)
    return models
