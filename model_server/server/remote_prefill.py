"""Lets another server compute prompts for this server (`--kv-transfer`), as the header
`x-prefiller-host-port` asks.

This server sends the request to the other server with one token of answer. Then it asks which blocks of the
prompt the other server has, waits as long as their transfer takes, and puts them into its own cache. The
request then runs on this server like any other, and finds the blocks. The blocks of a made-up model have no
content, so only their names are sent. `KvTransferSettings` says how long their content would take. If the
other server or the transfer fails, this server computes the prompt itself, and the request loses only time. A
client that sets the header makes this server call an address. So only the gateway may set the header, and the
header has no effect without the flag.
"""

import asyncio
import ipaddress
import json
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import aiohttp
import msgspec

from model_server.core.engine import Engine
from model_server.core.hashing import BlockHash
from model_server.core.request import Request

HEADER: Final = "x-prefiller-host-port"
BLOCKS_PATH: Final = "/kv_blocks"

_MOST_REPLY_BYTES: Final = 4096
_TIMEOUT_S: Final = 300.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class KvTransferSettings:
    """The time that KV takes from one server to another."""

    bytes_per_token: float = 131_072.0
    bytes_per_second: float = 1e10

    def __post_init__(self) -> None:
        if not (self.bytes_per_token > 0 and self.bytes_per_second > 0):
            raise ValueError("--kv-transfer-bytes-per-token and --kv-transfer-rate must be positive")

    def seconds(self, tokens: int) -> float:
        return tokens * self.bytes_per_token / self.bytes_per_second


class BlocksAsked(msgspec.Struct, frozen=True):
    """The names of a prompt's blocks in order, in hexadecimal."""

    hashes: tuple[str, ...]


class BlocksHeld(msgspec.Struct, frozen=True):
    held: int
    """The number of leading blocks that the answering server holds."""


class RemotePrefillError(Exception):
    """The other server did not compute the prompt or hand over its blocks. The message says why."""


class RemotePrefill:
    def __init__(
        self, engine: Engine, settings: KvTransferSettings, *, sleep: Callable[[float], Awaitable[None]]
    ) -> None:
        self._engine = engine
        self._settings = settings
        self._sleep = sleep

    def held(self, asked: BlocksAsked) -> BlocksHeld:
        """Return how many of the blocks this server can hand over to the server that asks. Raise ValueError
        if a hash is not hexadecimal.
        """
        pool, count = self._engine.kv_cache.pool, 0
        for text in asked.hashes:
            if pool.find(BlockHash(bytes.fromhex(text))) is None:
                break
            count += 1
        return BlocksHeld(count)

    async def fetch(self, where: str, path: str, raw: bytes, requests: Sequence[Request]) -> int:
        """Have the prompt computed at `where`, and get its blocks. Return the number of tokens that came. 0
        means that this server has to compute the prompt.
        """
        prompt = requests[0]
        if any(request.token_ids != prompt.token_ids for request in requests[1:]):
            return 0  # llm-d's sidecar does not send several prompts to the prefill server either
        kv, size = self._engine.kv_cache, self._engine.config.block_size_tokens
        known = len(kv.get_computed(prompt).blocks)
        missing = prompt.block_hashes[known : (len(prompt.token_ids) - 1) // size]
        if not missing:
            return 0
        try:
            held = await self._ask_prefill_server(_url(where), path, raw, missing)
        except (RemotePrefillError, aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            _log.warning(
                "%s did not compute a prompt for this server, so this server computes it: %r", where, error
            )
            return 0
        await self._sleep(self._settings.seconds(held * size))
        return max(0, kv.take_in(prompt, end_block=known + held) - known) * size

    async def _ask_prefill_server(self, url: str, path: str, raw: bytes, missing: Sequence[BlockHash]) -> int:
        body = await asyncio.to_thread(_one_token, raw)
        asked = json.dumps({"hashes": [block.hex() for block in missing]}).encode()
        timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            async with session.post(url + path, data=body, allow_redirects=False) as response:
                if response.status != 200:
                    raise RemotePrefillError(f"{path} was answered with {response.status}")
            async with session.post(url + BLOCKS_PATH, data=asked, allow_redirects=False) as response:
                reply = await response.content.read(_MOST_REPLY_BYTES)
                if response.status != 200:
                    raise RemotePrefillError(f"{BLOCKS_PATH} was answered with {response.status}")
        return max(0, min(msgspec.json.decode(reply, type=BlocksHeld).held, len(missing)))


def _url(where: str) -> str:
    """Return the URL. Raise RemotePrefillError if `where` is not `ip:port`."""
    host, _, port = where.rpartition(":")
    try:
        ip = ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
        number = int(port)
    except ValueError as error:
        raise RemotePrefillError(f"{where[:64]!r} is not ip:port") from error
    return f"http://[{ip}]:{number}" if ip.version == 6 else f"http://{ip}:{number}"


def _one_token(raw: bytes) -> bytes:
    """Return the same request, but for one answer of one token that is not streamed."""
    body: dict[str, Any] = msgspec.json.decode(raw)
    for name in ("stream", "stream_options", "max_completion_tokens", "min_tokens", "n", "best_of"):
        body.pop(name, None)
    return msgspec.json.encode({**body, "max_tokens": 1, "max_output_tokens": 1})
