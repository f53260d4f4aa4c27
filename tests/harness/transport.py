"""Which transport the pickers of a test run on: our own HTTP/2, unless a module asks for both.

A test that uses the fixture `both_transports` runs on both: twice, that is. Every picker that the harness starts meanwhile, in this
process or another, gets `listen.transport` from here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Final, Literal, cast

import pytest

_VARIABLE: Final = "PREFIX_GATEWAY_TEST_TRANSPORT"
TransportName = Literal["http2", "grpcio"]


def transport() -> TransportName:
    """The one in use now."""
    return cast("TransportName", os.environ.get(_VARIABLE, "http2"))


@pytest.fixture(scope="module", params=["http2", "grpcio"])
def both_transports(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(_VARIABLE, request.param)
        yield
