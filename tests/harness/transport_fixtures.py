"""Tests on both transports: each test that uses `both_transports` runs twice."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.harness.transport import VARIABLE


@pytest.fixture(scope="module", params=["http2", "grpcio"])
def both_transports(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, request.param)
        yield
