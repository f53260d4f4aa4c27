"""Spans on their way to a collector. A collector that is slow, fails or hangs costs spans, which are
counted, and no request waits for it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from epp.tracing.sending import Bounds, Sender

LONG_S = 60.0


class PatientCollector:
    """Accepts batches when the test lets it."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.open = threading.Event()
        self.asked = threading.Event()
        self.closed = threading.Event()
        self.answer: bool | Exception = True

    def send(self, batch: Sequence[int]) -> bool:
        self.asked.set()
        assert self.open.wait(LONG_S)
        self.batches.append(list(batch))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def close(self) -> None:
        self.closed.set()
        self.open.set()


@pytest.fixture
def collector() -> PatientCollector:
    return PatientCollector()


def sender_to(collector: PatientCollector, **bounds: float) -> Sender[int]:
    made: Sender[int] = Sender(
        collector.send,
        collector.close,
        bounds=Bounds(**{"max_queued": 8, "max_batch": 4, "delay_s": LONG_S, **bounds}),  # type: ignore[arg-type]
    )
    made.start()
    return made


def finish(sender: Sender[int]) -> None:
    sender.stop()
    assert sender.finished.wait(LONG_S)


def test_a_full_batch_is_sent_at_once_and_the_rest_at_the_end(collector: PatientCollector) -> None:
    collector.open.set()
    sender = sender_to(collector)
    for n in range(6):
        sender.put(n)
    assert collector.asked.wait(LONG_S), "only a full batch wakes the sender, since its delay is a minute"
    finish(sender)
    assert [n for batch in collector.batches for n in batch] == list(range(6))
    assert all(len(batch) <= 4 for batch in collector.batches)
    assert sender.counts == {"sent": 6, "failed": 0, "dropped": 0}


def test_a_batch_that_is_not_full_is_sent_after_the_delay(collector: PatientCollector) -> None:
    collector.open.set()
    sender = sender_to(collector, delay_s=0.01)
    sender.put(1)
    assert collector.asked.wait(LONG_S)
    finish(sender)


def test_while_the_collector_hangs_the_newest_spans_beyond_the_queue_are_dropped_and_counted(
    collector: PatientCollector,
) -> None:
    sender = sender_to(collector)
    for n in range(4):
        sender.put(n)
    assert collector.asked.wait(LONG_S)
    for n in range(100):
        sender.put(n)  # if this does not return, the test hangs here
    assert sender.counts["dropped"] == 100 - 8
    collector.open.set()
    finish(sender)
    assert sender.counts == {"sent": 12, "failed": 0, "dropped": 92}


@pytest.mark.parametrize("answer", [False, OSError("no route")])
def test_spans_that_do_not_arrive_are_counted_and_the_next_batch_is_tried(
    collector: PatientCollector, *, answer: bool | Exception
) -> None:
    collector.open.set()
    collector.answer = answer
    sender = sender_to(collector)
    for n in range(8):
        sender.put(n)
    finish(sender)
    assert sender.counts["failed"] == 8
    assert len(collector.batches) == 2


def test_giving_up_ends_a_sending_that_hangs(collector: PatientCollector) -> None:
    sender = sender_to(collector)
    for n in range(8):
        sender.put(n)
    assert collector.asked.wait(LONG_S)
    sender.stop()
    assert not sender.finished.is_set()
    sender.give_up()
    assert collector.closed.is_set()
    assert sender.finished.wait(LONG_S)
    assert len(collector.batches) == 1, "the queued spans are dropped"
