"""Input from other pickers: their batches."""

import itertools
from collections.abc import Sequence
from typing import get_args

import msgspec

from epp.base.types import pack_hashes
from epp.sources.sharing.batches import (
    Batch,
    HeldChain,
    MalformedBatchError,
    SharedBegan,
    SharedEvent,
    SharedFatal,
    SharedOver,
    SharedProved,
    SharedTrouble,
    Trouble,
    identity_of,
)
from epp.sources.sharing.batches import encode as packed
from tests.fuzz.behind import SMALL
from tests.fuzz.trees import as_msgpack
from tests.unit.picker.picker_questions import text
from tests.unit.sources.sharing.pickers import Replica, meet


class PeerBatches:
    """Batches of other pickers, from Redis or from the workers' hub."""

    words: Sequence[bytes] = (b"\x93\x02", b"\x98\x01", b"\xc4\x08" + b"\1" * 8, b"other", b"third", bytes(8))
    encode = staticmethod(as_msgpack)

    def __init__(self) -> None:
        self._replica = Replica(1, policy=SMALL)
        self.documents: Sequence[object] = [
            msgspec.msgpack.decode(each) for each in (*spoken(), *hand_made(self._replica))
        ]
        self.seeds: Sequence[bytes] = [*spoken(), *hand_made(self._replica)]
        self._now = itertools.count(1.0, 0.01)

    async def feed(self, data: bytes) -> bool:
        try:
            list(self._replica.exchange.listener.apply(data, now=next(self._now)))
        except MalformedBatchError:
            return False
        return True

    async def check(self) -> None:
        now = next(self._now)
        self._replica.exchange.listener.expire(now=now)
        self._replica.picker.housekeep(now=now)
        self._replica.check()
        assert self._replica.exchange.listener.peers < 2_000


def spoken() -> list[bytes]:
    """Return what a real picker sends."""
    one, other = Replica(8), Replica(9)
    meet([one, other], now=0.0)
    batches: list[bytes] = []
    for n in range(4):
        pick = one.pick(text(f"s{n}", 1_500), now=1.0 + n)
        batches += one.send(now=1.0 + n)
        one.end(pick, now=1.5 + n)
        batches += one.send(now=1.5 + n)
    return batches


def hand_made(replica: Replica) -> list[bytes]:
    """Return batches of two speakers in their order, with every kind of event."""
    state = next(iter(replica.picker.fleet.states()))
    at = (0, state.endpoint.name, identity_of(state))
    chain = pack_hashes([1, 2, 3])
    events: list[SharedEvent] = [
        HeldChain(*at, chain),
        SharedBegan(*at, 1, 9, "", chain),
        SharedBegan(*at, 1, 9, "x", chain),
        SharedProved(0, 1),
        SharedOver(0, 1, 1, failed=False, no_token=True),
    ]
    news: list[SharedEvent] = [SharedTrouble(*at, what) for what in get_args(Trouble)]
    news.append(SharedFatal(0, 7, 1))
    batches = [
        Batch(b"other", 1, 5, events),
        Batch(b"other", 2, 5, news),
        Batch(b"third", 1, 0, []),
    ]
    return [packed(batch) for batch in batches]
