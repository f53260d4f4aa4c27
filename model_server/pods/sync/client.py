"""Asks a model server, which is vLLM or `model-server`, for its LoRA adapters, and makes it load and unload
adapters. Caller: `loop`.
"""

from __future__ import annotations

from http import HTTPStatus
from types import TracebackType
from typing import Self

import aiohttp
import msgspec

from model_server.pods.sync.errors import ServerError
from model_server.pods.sync.plan import Action, AdapterName, Adapters, Load

_LIST_TIMEOUT_S = 10.0
_CHANGE_TIMEOUT_S = 300.0
"""The timeout is long, because a load may fetch gigabytes."""
_SHOWN_CHARACTERS = 300


class _Card(msgspec.Struct):
    id: str
    root: str | None = None
    parent: str | None = None


class _Cards(msgspec.Struct):
    data: list[_Card]


class _Fault(msgspec.Struct):
    message: str


class _Refusal(msgspec.Struct):
    error: _Fault


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
        return {AdapterName(card.id): card.root or "" for card in cards if card.parent is not None}

    async def do(self, action: Action) -> None:
        """Load or unload an adapter. Raise ServerError if the server refuses or fails."""
        if isinstance(action, Load):
            path, body = "/v1/load_lora_adapter", {"lora_name": action.name, "lora_path": action.path}
        else:
            path, body = "/v1/unload_lora_adapter", {"lora_name": action.name}
        await self._ask("POST", path, body, timeout_s=_CHANGE_TIMEOUT_S)

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
            raise ServerError(f"{path} answered {answer.status}: {_message(raw)}")
        return raw


def _message(raw: bytes) -> str:
    """Return the message of an error in the API's shape, or the beginning of any other answer."""
    try:
        text = msgspec.json.decode(raw, type=_Refusal).error.message
    except (msgspec.MsgspecError, UnicodeDecodeError):
        text = raw.decode(errors="replace")
    return text[:_SHOWN_CHARACTERS]
