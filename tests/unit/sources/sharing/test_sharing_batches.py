"""Batches: what a picker tells the others, which bytes are refused, and names of channels."""

import msgspec
import pytest
from msgspec.structs import replace

from epp.config.policy import DEFAULT_POLICY, Chunks, Policy
from epp.sources.sharing.batches import Kept, MalformedBatchError, SharedOver, decode_batch
from epp.sources.sharing.redis_link import SIGNATURE_BYTES, Seal
from tests.unit.picker.picker_questions import text
from tests.unit.sources.sharing.pickers import Replica, meet, two

SEAL = Seal(b"a key that nobody guesses")
SIGNED = SEAL.sign(b"batch of events", channel="pool") + b"batch of events"
STRIKE_WITHOUT_A_BODY = msgspec.msgpack.encode([b"other", 1, 5, [[6, 0, 0, 1]]])


def test_a_message_is_accepted_with_the_same_key() -> None:
    assert SEAL.opened(SIGNED, channel="pool") == b"batch of events"


@pytest.mark.parametrize(
    ("seal", "channel"), [(Seal(b"another key, as long as ours"), "pool"), (SEAL, "another pool")]
)
def test_another_key_or_pool_is_refused(seal: Seal, channel: str, caplog: pytest.LogCaptureFixture) -> None:
    assert seal.opened(SIGNED, channel=channel) == b""
    assert "sharing.redis.signingKeyFile" in caplog.text


@pytest.mark.parametrize("changed", [SIGNED[SIGNATURE_BYTES:], SIGNED[:-1] + b"!", SIGNED[:-1], b""])
def test_messages_that_changed_after_signing_are_refused(changed: bytes) -> None:
    assert SEAL.opened(changed, channel="pool") == b""


def test_events_without_room_in_the_queue_are_counted_and_forgotten() -> None:
    one, other = Replica(1, outbox_bytes=2000), Replica(2)
    meet([one, other], now=0.0)
    one.pick(text("told"), now=1.0)
    other.receive(one.send(now=1.0), now=1.0)
    for n in range(20):
        one.pick(text(str(n)), now=2.0)
    one.check()
    speaker = one.exchange
    assert speaker.waiting_bytes <= 2000
    assert 0 < speaker.counts.dropped_events < 20
    other.receive(one.send(now=3.0), now=3.0)
    assert sum(other.in_flight_of_peers().values()) == 20 - speaker.counts.dropped_events, (
        "the prompt that was reported before is forgotten too"
    )


def test_a_batch_holds_only_hashes_of_prompts() -> None:
    one, _ = two()
    one.pick(b"secret words " * 100, now=1.0)
    batches = b"".join(one.send(now=1.0))
    assert b"secret" not in batches


def test_an_end_says_whether_the_prompt_is_in_the_cache() -> None:
    one, _ = two()
    answered, failed, aborted = (one.pick(text(name), now=10.0) for name in "pqr")
    one.send(now=10.0)
    one.end(answered, now=11.0)
    one.end(failed, now=11.0, status=500)
    one.picker.end(aborted, outcome="aborted", now=11.0)
    (batch,) = (decode_batch(data) for data in one.send(now=11.0))
    ends = [event for event in batch.events if isinstance(event, SharedOver)]
    assert [(Kept(end.kept), end.failed) for end in ends] == [
        (Kept.COMPUTED, False),
        (Kept.LOST, True),
        (Kept.LOST, False),
    ], "a client that leaves before the answer begins is no fault of the server"


@pytest.mark.parametrize("data", [b"", b"\x93", b"{}", b"\xff" * 20, STRIKE_WITHOUT_A_BODY])
def test_bytes_that_are_not_a_batch_are_one_typed_error(data: bytes) -> None:
    one, _ = two()
    with pytest.raises(MalformedBatchError, match="not a batch"):
        list(one.exchange.listener.apply(data, now=1.0))
    one.check()


def test_pools_policies_and_formats_have_their_own_channels() -> None:
    one = Replica(1)
    spec = with_chunks(Chunks(size_bytes=512))
    finer = Replica(2, policy=spec)
    assert one.exchange.channel("a") != one.exchange.channel("b")
    assert one.exchange.channel("a") != finer.exchange.channel("a")
    before = one.exchange.channel("a")
    one.picker.set_policy(spec)
    assert one.exchange.channel("a") == finer.exchange.channel("a") != before
    assert one.exchange.channel("a").count("{") == 1


def with_chunks(chunks: Chunks) -> Policy:
    return replace(DEFAULT_POLICY, spec=replace(DEFAULT_POLICY.spec, chunks=chunks))


def test_the_rows_of_flow_control_of_an_older_picker_are_skipped() -> None:
    one, _ = two()
    batch = decode_batch(one.exchange.next_batch(now=9.0) or b"")
    older = [*msgspec.structs.astuple(batch), [("m", 0, "t", 0, 1, 1, 1)], True]
    assert decode_batch(msgspec.msgpack.encode(older)) == batch
