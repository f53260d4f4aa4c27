"""The `exactMode` section of the configuration. Part of `epp.config`, which reads the file."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from epp.errors import ConfigError


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """As every section of the configuration: frozen, camelCase, unknown fields refused."""


class ExactModel(_Section, frozen=True):
    """How the servers of one base model make tokens of prompts, and names of blocks."""

    tokenizer_folder: Annotated[
        str,
        Meta(
            min_length=1,
            description="Folder with the model's `tokenizer.json`, `tokenizer_config.json` and chat template.",
        ),
    ]
    model: Annotated[
        str, Meta(max_length=1024, description="As the endpoints' `model` says it; empty: every other model.")
    ] = ""
    chat_template_file: Annotated[
        str, Meta(description="Where servers run with `--chat-template`: that file.")
    ] = ""
    chat_template_arguments: Annotated[
        dict[str, Any], Meta(description="Where servers run with `--default-chat-template-kwargs`: those.")
    ] = {}
    hash_algorithm: Annotated[
        Literal["auto", "sha256", "sha256_cbor", "xxhash", "xxhash_cbor"],
        Meta(description="The servers' `--prefix-caching-hash-algo`; auto: learned from their events."),
    ] = "auto"
    hash_seed: Annotated[
        str, Meta(max_length=1024, description="The servers' PYTHONHASHSEED; empty: they have none.")
    ] = ""
    adapters: Annotated[
        dict[str, str],
        Meta(
            max_length=4096,
            description="Path that servers load each LoRA adapter from, by its name: a part of its blocks' names.",
        ),
    ] = {}


_Port = Annotated[int, Meta(ge=0, le=65535)]


class ExactMode(_Section, frozen=True):
    """Follow the servers' KV events, so that the table is what they hold, not what they should. See docs/exact-mode.md."""

    models: Annotated[tuple[ExactModel, ...], Meta(min_length=1, max_length=256)]
    events_port: Annotated[
        _Port,
        Meta(
            description="Where servers publish events (ZeroMQ), unless their entry in `endpointsFile` names an address; 0: nowhere."
        ),
    ] = 5557
    replay_port: Annotated[
        _Port,
        Meta(description="Where they replay missed ones; 0: nowhere, and each gap costs what was known."),
    ] = 5558
    topic: Annotated[str, Meta(max_length=255, description="The servers' topic.")] = ""
    max_blocks: Annotated[
        int, Meta(ge=1000, le=10**9, description="Blocks of all servers together, about 90 bytes each.")
    ] = 2_000_000
    max_chunks: Annotated[
        int,
        Meta(ge=1000, le=10**8, description="Chunks of routed prompts that are followed, about 1 KB each."),
    ] = 100_000
    max_queued_prompts: Annotated[
        int, Meta(ge=1, le=10**6, description="Prompts that wait to be looked at; more are passed over.")
    ] = 1000
    max_queued_bytes: Annotated[
        int, Meta(ge=65536, le=2**34, description="Prompt text that is kept for it, from pick to look.")
    ] = 64 * 2**20

    def validate(self) -> None:
        """ConfigError with the field at fault."""
        first: dict[str, int] = {}
        for n, one in enumerate(self.models):
            if one.model in first:
                named = f"{one.model!r} is" if one.model else "empty: every other model is"
                raise ConfigError(f"exactMode.models[{n}].model: {named} models[{first[one.model]}] already")
            first[one.model] = n
        if self.events_port and self.events_port == self.replay_port:
            raise ConfigError("exactMode.replayPort: events and replay need two ports")
