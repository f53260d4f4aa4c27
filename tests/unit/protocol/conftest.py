"""The bench that several tests of streams use."""

from __future__ import annotations

import pytest

from tests.unit.protocol.stream_bench import Bench


@pytest.fixture
def bench() -> Bench:
    return Bench()
