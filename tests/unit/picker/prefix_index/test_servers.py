"""Servers of the prefix table that join, change their size, restart or leave."""

from __future__ import annotations

import pytest

from epp.picker.prefix_index.integrity import check_integrity
from epp.picker.prefix_index.upkeep import add_endpoint, drop_endpoint, resize
from tests.unit.picker.prefix_index.tables import A, B, C, chain, new_table


def test_unknown_servers_and_impossible_sizes_are_refused() -> None:
    table = new_table(A)
    with pytest.raises(KeyError):
        drop_endpoint(table, B)
    with pytest.raises(ValueError, match="already"):
        add_endpoint(table, A, capacity_bytes=1)
    with pytest.raises(ValueError, match="capacity"):
        resize(table, A, capacity_bytes=-1)
    with pytest.raises(ValueError, match="capacity"):
        add_endpoint(table, B, capacity_bytes=-1)
    assert list(table.mirrors) == [A]


class TestServersThatRestartOrLeave:
    def test_a_new_server_in_the_slot_of_a_departed_server_inherits_nothing(self) -> None:
        table = new_table(A, B)
        table.record(A, chain("abc"), now=1)
        drop_endpoint(table, A)
        add_endpoint(table, C, capacity_bytes=10)
        assert table.match(chain("abc")) == {}
        table.record(C, chain("abc"), now=2)
        assert table.match(chain("abc")) == {C: 3}
        check_integrity(table)
