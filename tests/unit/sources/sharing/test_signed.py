"""With a pool key, messages that the pool did not sign are refused."""

from __future__ import annotations

import pytest

from epp.sources.sharing.signed import SIGNATURE_BYTES, Kind, Seal

SEAL = Seal(b"a key that nobody guesses")
SIGNED = SEAL.sign("batch", b"batch of events", channel="pool") + b"batch of events"


def test_a_message_is_accepted_with_the_same_key() -> None:
    opened = SEAL.opened("batch", SIGNED, channel="pool")
    assert opened is not None
    assert bytes(opened) == b"batch of events"


@pytest.mark.parametrize(
    ("seal", "kind", "channel"),
    [
        (Seal(b"another key, as long as ours"), "batch", "pool"),
        (SEAL, "table", "pool"),
        (SEAL, "batch", "another pool"),
    ],
)
def test_another_key_channel_or_kind_is_refused(
    seal: Seal, kind: Kind, channel: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert seal.opened(kind, SIGNED, channel=channel) is None
    assert "sharing.redis.signingKeyFile" in caplog.text


@pytest.mark.parametrize("changed", [SIGNED[SIGNATURE_BYTES:], SIGNED[:-1] + b"!", SIGNED[:-1], b""])
def test_messages_that_changed_after_signing_are_refused(changed: bytes) -> None:
    assert SEAL.opened("batch", changed, channel="pool") is None
