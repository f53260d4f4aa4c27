"""The invariants of the gate and of flow control behind it (`epp/picker/gate`, `flow`, `unserved`)."""

from collections.abc import Iterable
from math import inf
from typing import TypeVar

from epp.picker.flow.control import FlowControl
from epp.picker.flow.queues import _BY_ALARM, _BY_PLACE, Alarms, QueueItem, QueueLoad, Queues, _Waits
from epp.picker.gate import Gate
from epp.picker.unserved import Unserved

T = TypeVar("T")
W = TypeVar("W", bound=_Waits)


def check_gate(gate: Gate) -> None:
    _check_unserved(gate._unserved)
    for queue in gate._queues.values():
        check_flow(queue.control)


def check_flow(control: FlowControl[T]) -> None:
    bands = control._queues._bands.values()
    waiting = [item for band in bands for flow in band.flows.values() for item in flow.items]
    _check_load(control._queues.load, waiting)
    _check_queues(control._queues)
    check_alarms(control._alarms, [i for i in waiting if min(i.expires_at, i.deadline) < inf])


def _check_queues(queues: Queues[T]) -> None:
    for priority, band in queues._bands.items():
        _check_load(band.load, [item for flow in band.flows.values() for item in flow.items])
        for tenant, flow in band.flows.items():
            _check_load(flow.load, flow.items)
            assert flow.tag >= 0
            assert flow.items == sorted(flow.items, key=_BY_PLACE)
            for item in flow.items:
                assert (item.waits, item.priority, item.tenant) == (True, priority, tenant)
            assert queues._worst_over(flow) is None


def _check_load(load: QueueLoad, items: Iterable[QueueItem[T]]) -> None:
    added = QueueLoad()
    for item in items:
        added.count(item, 1)
    counts = (load.requests, load.size_bytes, load.tokens)
    assert counts == (added.requests, added.size_bytes, added.tokens)


def check_alarms(alarms: Alarms[W], waiting: Iterable[W]) -> None:
    """waiting: the requests that should have an alarm. Those that were pushed out have one too."""
    assert alarms._items == sorted(alarms._items, key=_BY_ALARM)
    assert {item.number for item in waiting} == {i.number for i in alarms._items if i.alarm_at > -inf}


def _check_unserved(unserved: Unserved) -> None:
    waiting = [each for requests in unserved._models.values() for each in requests.values()]
    assert all(unserved._models.values())
    assert unserved._bytes == sum(each.size_bytes for each in waiting)
    check_alarms(unserved._ends, waiting)
