"""Batches as bytes: what is refused. The names of channels."""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace

from epp.config.policy import DEFAULT_POLICY, Policy
from epp.config.routing import Chunks
from epp.sources.sharing.batches import MalformedBatchError, decode_batch
from tests.unit.sources.sharing.pickers import Replica, two


@pytest.mark.parametrize("data", [b"", b"\x93", b"{}", b"\xff" * 20])
def test_bytes_that_are_not_a_batch_are_one_typed_error(data: bytes) -> None:
    one, _ = two()
    with pytest.raises(MalformedBatchError, match="not a batch"):
        one.exchange.receive(data, now=1.0)
    one.check()


def test_pools_policies_and_formats_have_their_own_channels() -> None:
    one = Replica(1)
    spec = with_chunks(Chunks(size_bytes=512))
    finer = Replica(2, policy=spec)
    assert one.exchange.channel("a") != one.exchange.channel("b")
    assert one.exchange.channel("a") != finer.exchange.channel("a")
    before = one.exchange.channel("a")
    one.picker.set_policy(spec, now=1.0)
    assert one.exchange.channel("a") == finer.exchange.channel("a") != before
    assert one.exchange.channel("a").count("{") == 1


def with_chunks(chunks: Chunks) -> Policy:
    return replace(DEFAULT_POLICY, spec=replace(DEFAULT_POLICY.spec, chunks=chunks))


def test_the_rows_of_flow_control_of_an_older_picker_are_skipped() -> None:
    one, _ = two()
    batch = decode_batch(one.exchange.next_batch(now=9.0) or b"")
    older = [*msgspec.structs.astuple(batch), [("m", 0, "t", 0, 1, 1, 1)], True]
    assert decode_batch(msgspec.msgpack.encode(older)) == batch
