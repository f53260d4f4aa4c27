"""With a pool key, messages that the pool did not sign are refused."""

from __future__ import annotations

import pytest

from epp.sources.sharing.link import Received
from epp.sources.sharing.signed import SIGNATURE_BYTES, SignedLink

KEY = b"a key that nobody guesses"


class Shelf:
    """A link that keeps its messages for any reader."""

    def __init__(self) -> None:
        self.batches: list[bytes] = []
        self.table: bytes | None = None

    async def agree(self, pool: str, mine: bytes) -> bytes:
        raise AssertionError("a signed link leaves that to the one below")

    async def join(self, channel: str) -> None: ...

    async def send(self, batch: bytes) -> None:
        self.batches.append(batch)

    async def read(self) -> list[Received]:
        return [Received(batch, 0.5) for batch in self.batches]

    async def recover(self) -> None: ...

    async def stored(self) -> Received | None:
        return None if self.table is None else Received(self.table, 0.5)

    async def store(self, table: bytes) -> None:
        self.table = table

    async def take_turn(self, name: str, *, period_s: float) -> bool:
        return True

    async def close(self) -> None: ...


async def link_on(shelf: Shelf, *, key: bytes = KEY, channel: str = "pool") -> SignedLink:
    link = SignedLink(shelf, key=key)
    await link.join(channel)
    return link


async def test_messages_and_tables_are_accepted_with_the_same_key() -> None:
    shelf = Shelf()
    one, other = await link_on(shelf), await link_on(shelf)
    await one.send(b"batch")
    await one.store(b"table")
    assert await other.read() == [Received(b"batch", 0.5)]
    assert await other.stored() == Received(memoryview(b"table"), 0.5)


@pytest.mark.parametrize(
    ("key", "channel"), [(b"another key, as long as ours", "pool"), (KEY, "another pool")]
)
async def test_messages_with_another_key_or_for_another_channel_are_refused(
    key: bytes, channel: str, caplog: pytest.LogCaptureFixture
) -> None:
    shelf = Shelf()
    stranger, ours = await link_on(shelf, key=key, channel=channel), await link_on(shelf)
    await stranger.send(b"batch")
    await stranger.store(b"table")
    assert await ours.read() == [Received(b"", 0.5)], "this is not a batch, so it is counted as malformed"
    assert await ours.stored() is None
    assert "sharing.redis.signingKeyFile" in caplog.text


@pytest.mark.parametrize("what", ["unsigned", "changed", "cut", "empty", "a batch as the table"])
async def test_messages_that_changed_after_signing_are_refused(what: str) -> None:
    shelf = Shelf()
    link = await link_on(shelf)
    await link.send(b"batch of events")
    (signed,) = shelf.batches
    shelf.batches = [
        {
            "unsigned": signed[SIGNATURE_BYTES:],
            "changed": signed[:-1] + b"!",
            "cut": signed[:-1],
            "empty": b"",
            "a batch as the table": b"",
        }[what]
    ]
    shelf.table = signed
    assert [received.data for received in await link.read()] == [b""]
    assert await link.stored() is None
