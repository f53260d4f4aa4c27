"""The bench that several tests of streams use."""

import pytest

from tests.unit.protocol.stream_bench import Bench


@pytest.fixture
def bench() -> Bench:
    return Bench()
