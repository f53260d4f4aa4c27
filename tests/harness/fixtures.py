"""Fixtures over the harness."""

import resource
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.harness.gateway import EnvoyBench, Gateway, running_bootstrap, running_gateway


@pytest.fixture(scope="session", autouse=True)
def many_open_files() -> None:
    """Allow as many open files as this user may have: thousands of streams that are held at once need a
    socket or two each.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


@pytest_asyncio.fixture
async def bench(tmp_path: Path) -> AsyncIterator[EnvoyBench]:
    """Run Envoy between two backends and a fake picker."""
    async with running_bootstrap(tmp_path) as running:
        yield running


@pytest_asyncio.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    """Run the real picker, Envoy and three backends."""
    async with running_gateway(tmp_path) as running:
        yield running
