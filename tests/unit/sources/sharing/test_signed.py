"""With a pool key, messages that the pool did not sign are refused."""

from __future__ import annotations

import pytest

from epp.sources.sharing.redis_link import SIGNATURE_BYTES, Seal

SEAL = Seal(b"a key that nobody guesses")
SIGNED = SEAL.sign(b"batch of events", channel="pool") + b"batch of events"


def test_a_message_is_accepted_with_the_same_key() -> None:
    assert SEAL.opened(SIGNED, channel="pool") == b"batch of events"


@pytest.mark.parametrize(
    ("seal", "channel"), [(Seal(b"another key, as long as ours"), "pool"), (SEAL, "another pool")]
)
def test_another_key_or_channel_is_refused(
    seal: Seal, channel: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert seal.opened(SIGNED, channel=channel) == b""
    assert "sharing.redis.signingKeyFile" in caplog.text


@pytest.mark.parametrize("changed", [SIGNED[SIGNATURE_BYTES:], SIGNED[:-1] + b"!", SIGNED[:-1], b""])
def test_messages_that_changed_after_signing_are_refused(changed: bytes) -> None:
    assert SEAL.opened(changed, channel="pool") == b""
