"""Defines the `exactMode` section of the configuration, which `epp.config.settings` reads."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from epp.base.errors import ConfigError
from epp.config.strict import Strict


class ExactModel(Strict, frozen=True):
    """Describes how the servers of one base model turn prompts into tokens and name their blocks."""

    tokenizer_folder: Annotated[str, Meta(min_length=1)]
    """Folder with the model's `tokenizer.json`, `tokenizer_config.json` and chat template."""
    model: Annotated[str, Meta(max_length=1024)] = ""
    """Base model, as in the `model` of the endpoints. Empty means every other model."""
    chat_template_file: str = ""
    """The file that the servers use with `--chat-template`. Empty means that they do not use this option."""
    chat_template_arguments: dict[str, Any] = {}
    """The value that the servers have for `--default-chat-template-kwargs`, if any."""
    hash_seed: Annotated[str, Meta(max_length=1024)] = ""
    """PYTHONHASHSEED of the servers. Empty means that they do not set it."""
    adapters: Annotated[dict[str, str], Meta(max_length=4096)] = {}
    """Path from which the servers load each LoRA adapter, by adapter name. The servers use this path in the
    names of the adapter's blocks."""


_Port = Annotated[int, Meta(ge=0, le=65535)]


class ExactMode(Strict, frozen=True):
    """Follow the KV events of the servers, so that the prefix table shows what they really hold. See
    docs/exact-mode.md.
    """

    models: Annotated[tuple[ExactModel, ...], Meta(min_length=1, max_length=256)]
    events_port: _Port = 5557
    """Port on which servers publish events (ZeroMQ), unless their entry in `endpointsFile` names an address.
    0 means none."""
    replay_port: _Port = 5558
    """Port on which servers replay missed events. 0 means none: after each gap the picker then forgets what
    it knew of the server."""
    topic: Annotated[str, Meta(max_length=255)] = ""
    """Topic of the events."""
    max_blocks: Annotated[int, Meta(ge=1000, le=10**9)] = 2_000_000
    """Largest number of blocks to follow on all servers together. A block takes about 90 bytes of memory."""

    def validate(self) -> None:
        """Check what the types cannot check. The ConfigError names the field at fault."""
        first: dict[str, int] = {}
        for n, one in enumerate(self.models):
            if one.model in first:
                what = repr(one.model) if one.model else "every other model"
                raise ConfigError(
                    f"exactMode.models[{n}].model: models[{first[one.model]}] is for {what} too; remove one of the two"
                )
            first[one.model] = n
        if self.events_port and self.events_port == self.replay_port:
            raise ConfigError("exactMode.replayPort: events and replay need two different ports")
