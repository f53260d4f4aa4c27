"""The decoder of one connection's header blocks, and the blocks that it does not have to decode again."""

from __future__ import annotations

from epp.http2.headers import HeaderReader
from tests.harness.http2_frames import NO_TABLE, PATH, block


def test_header_blocks_are_remembered_only_once_the_peer_has_given_up_its_table() -> None:
    reader = HeaderReader(max_list_bytes=16_384)
    reader.request(block())
    assert not reader.known
    reader.request(NO_TABLE + block())
    request = reader.request(block())
    assert reader.known[block()] is request
    assert request.path == PATH


def test_the_number_of_known_blocks_is_bounded() -> None:
    reader = HeaderReader(max_list_bytes=16_384)
    reader.request(NO_TABLE + block())
    for n in range(400):
        reader.request(block(replace=[("x", str(n))]))
        assert 0 < len(reader.known) <= 256
