"""Asks a model server, which is vLLM or `model-server`, for its LoRA adapters, and makes it load and unload
adapters. Caller: `sync`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from types import TracebackType
from typing import Literal, Self

import aiohttp
import msgspec

Adapters = Mapping[str, str]
"""The path of each adapter, by name."""

_LIST_TIMEOUT_S = 10.0
_CHANGE_TIMEOUT_S = 300.0
"""The timeout is long, because a load may fetch gigabytes."""
_SHOWN_CHARACTERS = 300


class ServerError(Exception):
    """The server cannot be reached, or refused the request. The status and the log show the message."""


@dataclass(frozen=True, slots=True)
class Action:
    verb: Literal["load", "unload"]
    name: str
    path: str
    """The path from which the adapter is loaded, or was loaded."""


class _Card(msgspec.Struct):
    id: str
    root: str | None = None
    parent: str | None = None


class _Cards(msgspec.Struct):
    data: list[_Card]


class AdapterServer:
    """One server, named by its base URL. This class is an async context manager."""

    def __init__(self, url: str, *, api_key: str | None = None) -> None:
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self.url = url.rstrip("/")
        self._session = aiohttp.ClientSession(headers=headers)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    async def adapters(self) -> Adapters:
        """Return the adapters that the server has. Raise ServerError if the server does not answer with a
        list.
        """
        raw = await self._ask("GET", "/v1/models", None, timeout_s=_LIST_TIMEOUT_S)
        try:
            cards = msgspec.json.decode(raw, type=_Cards).data
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ServerError(f"{self.url}/v1/models is not a list of models: {error}") from error
        return {card.id: card.root or "" for card in cards if card.parent is not None}

    async def do(self, action: Action) -> None:
        """Load or unload an adapter. Raise ServerError if the server refuses or fails."""
        body = {"lora_name": action.name}
        if action.verb == "load":
            body["lora_path"] = action.path
        await self._ask("POST", f"/v1/{action.verb}_lora_adapter", body, timeout_s=_CHANGE_TIMEOUT_S)

    async def _ask(self, method: str, path: str, body: dict[str, str] | None, *, timeout_s: float) -> bytes:
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._session.request(method, self.url + path, json=body, timeout=timeout) as answer:
                raw = await answer.read()
        except TimeoutError as error:
            raise ServerError(f"{self.url}{path} did not answer in {timeout_s:.0f} s") from error
        except (aiohttp.ClientError, ValueError) as error:
            raise ServerError(f"{self.url}{path}: {error}") from error
        if answer.status != HTTPStatus.OK:
            shown = raw.decode(errors="replace")[:_SHOWN_CHARACTERS]
            raise ServerError(f"{path} answered {answer.status}: {shown}")
        return raw
