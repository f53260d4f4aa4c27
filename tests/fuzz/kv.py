"""KV events of a model server."""

import itertools
from collections.abc import Sequence

import msgspec

from epp.sources.kvevents.exact import Exact, ModelSettings
from epp.sources.kvevents.sequence import Messages
from tests.fuzz.behind import MOST_ENTRIES, A, one_pick, small_picker
from tests.fuzz.trees import as_msgpack
from tests.invariants.kvevents import check_exact, check_sequence
from tests.unit.sources.kvevents.routed import NoLanguage


class KvEvents:
    """A server's KV events, after their messages were put in order."""

    words: Sequence[bytes] = (
        b"BlockStored",
        b"BlockRemoved",
        b"AllBlocksCleared",
        b"medium",
        b"token_ids",
        b"\xa3GPU",
        b"\xa3CPU",
    )
    encode = staticmethod(as_msgpack)

    def __init__(self) -> None:
        batches = [
            [
                0.0,
                [
                    {
                        "type": "BlockStored",
                        "block_hashes": [1, 2],
                        "token_ids": list(range(8)),
                        "block_size": 4,
                        "medium": "GPU",
                    }
                ],
                0,
            ],
            [
                0.0,
                [["BlockStored", [3], 1, [1, 2, 3, 4], 4, None, "CPU"], ["BlockRemoved", [1], "GPU"]],
                None,
            ],
            [0.0, [{"type": "BlockRemoved", "block_hashes": [b"x" * 32]}, {"type": "AllBlocksCleared"}]],
        ]
        self.documents: Sequence[object] = batches
        self.seeds: Sequence[bytes] = [msgspec.msgpack.encode(batch) for batch in batches]
        self._exact = Exact(
            {"": ModelSettings(language=NoLanguage())}, max_blocks=MOST_ENTRIES, max_chunks=MOST_ENTRIES
        )
        self._messages = Messages(replays=False, gaps={"found": 0, "lost": 0})
        self._exact.add(A, model="m")
        self._picker = small_picker()
        self._now, self._number = itertools.count(1.0), itertools.count()

    async def feed(self, data: bytes) -> bool:
        before, now = self._exact.malformed, next(self._now)
        steps = self._messages.live(next(self._number), data)
        self._exact.apply(A, steps, complete=self._messages.complete, now=now)
        self._picker.caches.take_in(self._exact.findings(now=now))
        return self._exact.malformed == before

    async def check(self) -> None:
        check_sequence(self._messages)
        check_exact(self._exact)
        if self._exact.servers()[A].state == "off":
            # The server sent too much. Exact mode follows its next process again.
            self._exact.drop(A)
            self._exact.add(A, model="m")
        one_pick(self._picker, now=next(self._now))
