"""Our picker, one for the tests of a module, which run on both transports."""

from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from tests.conformance.picker import OwnPicker, own_picker
from tests.harness.transport import VARIABLE


@pytest.fixture(scope="module", params=["http2", "grpcio"])
def both_transports(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, request.param)
        yield


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def picker(
    tmp_path_factory: pytest.TempPathFactory,
    both_transports: None,
) -> AsyncIterator[OwnPicker]:
    async with own_picker(tmp_path_factory.mktemp("picker")) as ours:
        yield ours
