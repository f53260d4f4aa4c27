"""Without a headroom in the policy, a request waits only if a more urgent one may come."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.flow.a_fleet import SECOND, learning


def test_every_request_goes_at_once_if_no_more_pressing_one_is_expected() -> None:
    gate = learning()
    for n in range(20):
        gate.offer(SECOND, now=0.1 * n)
    assert len(gate.let_go) == 20


@pytest.mark.parametrize("other", [{"priority": 10}, {"tenant": "light"}], ids=["priority", "tenant"])
def test_a_request_that_may_be_overtaken_waits_until_a_server_is_free(other: dict[str, Any]) -> None:
    gate = learning()
    gate.offer(SECOND, now=0.0, **other)
    item = gate.offer(SECOND, now=0.0)
    assert item.waits
    gate.run(now=0.0, until=0.95)
    assert gate.let_go[-1] is item


def test_a_kind_of_request_that_has_not_come_for_31_seconds_is_not_expected() -> None:
    gate = learning()
    gate.offer(SECOND, priority=10, now=0.0)
    for _ in range(2):
        assert not gate.offer(SECOND, now=31.0).waits


def test_the_most_pressing_requests_do_not_wait() -> None:
    gate = learning()
    gate.offer(SECOND, now=0.0)
    assert [gate.offer(SECOND, priority=10, now=0.0).waits for _ in range(3)] == [False] * 3
