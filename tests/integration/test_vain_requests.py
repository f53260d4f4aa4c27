"""A client whose requests come to nothing costs the others no cached token. Real servers with small caches
count what they had cached.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import zip_longest
from pathlib import Path

import pytest

from tests.harness.client import Client, Reply
from tests.harness.gateway import PickerProcess, config_in, running_front, write_endpoints
from tests.harness.model_servers import MODEL, running_model_servers

pytestmark = pytest.mark.envoy

SHORT = [f"document {n}: " + f"{n} is what it is about. " * 150 for n in range(40)]
LONG = [f"{n} long documents. " * 1_000 for n in range(5)]


@asynccontextmanager
async def site(directory: Path, *flags: str) -> AsyncIterator[tuple[PickerProcess, Client]]:
    # A request without the picker, on a busy machine, would miss.
    config = config_in(directory, envoy={"messageTimeoutSeconds": 30})
    async with running_model_servers(directory, count=3, flags=("--speed", "10", *flags)) as servers:
        write_endpoints(config, servers)
        front = running_front(config, directory=directory, servers=[server.address for server in servers])
        async with front as (picker, _, client):
            await picker.reads_bodies()
            yield picker, client


async def send(client: Client, prompt: str) -> Reply:
    return await client.complete(prompt, model=MODEL, max_tokens=2)


async def share(client: Client, prompts: Sequence[str], *, refused: Sequence[str] = ()) -> float:
    """Send the prompts in turn, after each one of those that servers refuse. Return the share of the prompts'
    tokens that the servers had cached.
    """
    used = []
    for prompt, bad in zip_longest(prompts, refused):
        used.append((await send(client, prompt)).json()["usage"])
        if bad:
            assert (await send(client, bad)).status == 400
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in used)
    return float(cached / sum(usage["prompt_tokens"] for usage in used))


@pytest.mark.parametrize(("prompts", "words"), [(SHORT, 80_000), (LONG, 400_000)])
async def test_prompts_that_servers_refuse_cost_others_no_cached_token(
    tmp_path: Path, prompts: list[str], words: int
) -> None:
    async with site(tmp_path, "--num-blocks", "1024", "--max-model-len", "8192") as (_, client):
        await share(client, prompts)
        alone = await share(client, prompts)
        assert alone > 0.9
        too_long = [f"bad {n} " + "word " * words for n, _ in enumerate(prompts)]
        assert await share(client, prompts, refused=too_long) > alone - 0.01
        assert await share(client, prompts) > alone - 0.01


async def test_long_requests_that_are_aborted_cost_others_no_cached_token(tmp_path: Path) -> None:
    async with site(tmp_path, "--num-blocks", "40000") as (picker, client):
        await share(client, SHORT)
        alone = await share(client, SHORT)
        assert alone > 0.9
        for n in range(6):
            async with client.stream(f"bad {n} " + "word " * 400_000, model=MODEL) as reply:
                reply.abort()  # its headers come before its prefill
        await picker.idle()
        assert await share(client, SHORT) > alone - 0.01
