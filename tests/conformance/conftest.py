"""Our picker, one for the tests of a module."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.conformance.picker import OwnPicker, own_picker
from tests.harness.transport_fixtures import both_transports  # noqa: F401 - a fixture


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def picker(
    tmp_path_factory: pytest.TempPathFactory,
    both_transports: None,  # noqa: F811 - the fixture
) -> AsyncIterator[OwnPicker]:
    async with own_picker(tmp_path_factory.mktemp("picker")) as ours:
        yield ours
