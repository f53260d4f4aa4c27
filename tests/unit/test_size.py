"""What was taken away does not come back unseen: `make size` prints the counts."""

import pytest

from bench.size import LIMITS, counts


@pytest.fixture(scope="module")
def counted() -> dict[str, int]:
    return counts()


@pytest.mark.parametrize("name", LIMITS)
def test_nothing_grows_over_its_limit(counted: dict[str, int], name: str) -> None:
    assert counted[name] <= LIMITS[name][1], "take something away, or say in the commit why the limit rises"
