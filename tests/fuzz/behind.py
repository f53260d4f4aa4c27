"""A small picker behind an entry, and the check that the picker still picks."""

import contextlib
import itertools
import random
from collections.abc import Sequence

import msgspec

from epp.base.errors import PickError
from epp.base.types import Address, ApiKind, Endpoint, EndpointName, InferenceRequest
from epp.config.policy import DEFAULT_POLICY, Table
from epp.picker.decision import Question
from epp.picker.picker import Picker
from tests.invariants.picker import check_picker

MOST_ENTRIES = 2_000
SMALL = msgspec.structs.replace(
    DEFAULT_POLICY, spec=msgspec.structs.replace(DEFAULT_POLICY.spec, table=Table(max_entries=MOST_ENTRIES))
)
"""A small table. It is soon full, so that the tests notice growth."""
A = EndpointName("a")


def small_picker() -> Picker:
    picker = Picker(SMALL, rng=random.Random(1))
    picker.news.set_endpoints([Endpoint(A, Address("10.0.0.1", 8000), model="m")], now=0.0)
    return picker


def one_pick(picker: Picker, *, now: float) -> None:
    """After the input the picker still picks, or gives a reason."""
    inference = InferenceRequest(kind=ApiKind.COMPLETIONS, model="m", prompt=b"some prompt " * 50)
    with contextlib.suppress(PickError):
        pick = picker.pick(Question(request_id="r", inference=inference), now=now)
        picker.end(pick, outcome="ended", now=now)
    picker.housekeep(now=now)
    check_picker(picker)


class BeforePicker:
    """An entry with a small picker behind it, which still picks after every input."""

    def __init__(self) -> None:
        self._picker = small_picker()
        self._now = itertools.count(1.0)

    async def check(self) -> None:
        one_pick(self._picker, now=next(self._now))


class OfBytes:
    """An entry whose input is not a document."""

    documents: Sequence[object] = ()

    def encode(self, _: object, /) -> bytes:
        raise NotImplementedError
