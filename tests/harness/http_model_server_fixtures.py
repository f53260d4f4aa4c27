"""The fixture of `http_model_server`."""

from collections.abc import AsyncIterator

import pytest_asyncio

from tests.harness.http_model_server import Start, starting


@pytest_asyncio.fixture
async def start() -> AsyncIterator[Start]:
    """Starts a model server."""
    async with starting() as start:
        yield start
