"""The invariants of what pickers share (`epp/sources/sharing`)."""

from epp.sources.sharing.exchange import Exchange
from epp.sources.sharing.listener import Listener


def check_exchange(exchange: Exchange) -> None:
    assert exchange.waiting_bytes == sum(size_bytes for _, size_bytes in exchange._events)
    assert exchange.waiting_bytes <= exchange._limit_bytes
    assert all(0 < number <= exchange._newest for number in exchange._numbers.values())
    _check_listener(exchange.listener)


def _check_listener(listener: Listener) -> None:
    assert listener._open == sum(len(peer.open) for peer in listener._peers.values())
    held: dict[int, int] = {}
    for peer in listener._peers.values():
        for request in [request for request in peer.open.values() if request.booked]:
            held[id(request.guess.state)] = held.get(id(request.guess.state), 0) + 1
    for state in listener._picker.fleet.states():
        assert state.peers_in_flight >= held.get(id(state), 0)
