"""Lists the modules that one request runs through: from the bytes on a connection to the bytes of the answer
and the end of the stream.

`python -m bench.request_path`. A picker in this process, on its own HTTP/2, serves chat requests of a gRPC
client. The last requests are traced, since the usual parts of requests are cached by then. Prints each module
of `epp` whose code runs for every traced request, in the order in which the modules are entered, with the
functions called there, and the calls from a layer to a higher one (`[tool.importlinter]` in pyproject.toml
has the layers). Prints too how often one who follows one message through the code has to come back: a return
is a call from one module into another that the message had entered, and left, before.

Two kinds of modules are printed apart. Some run only now and then, for example when the client's HTTP/2 sends
a PING. Others run only for listeners, which are not on the way of a request: the picker sends events to its
subscribers, knows none of them, and needs nothing from them.
"""

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Final

import grpc
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc

from bench.bench_path import answer_of, messages_of, picker_of_pods
from bench.dataplane.load import Prompts
from bench.drawing import layers
from epp.config.sections import Listen
from epp.observe.telemetry.decisions import DecisionRing
from epp.observe.telemetry.metrics import Metrics
from epp.observe.telemetry.picker_state import PickerStatus
from epp.picker.gate import Gate
from epp.protocol.settings import StreamSettings
from epp.transport.server import ExtProcServer

_METHOD: Final = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
_REQUESTS: Final = 40
_TRACED: Final = 10
_NOW_S: Final = 1000.0
"""The time that the picker sees. Tracing takes long, and nobody else waits for these requests."""
_REPORTING: Final = frozenset({"on_event"})
"""The names of functions that receive the picker's events."""


@dataclass
class Walk:
    """The modules that ran for one request, or for every one of several requests."""

    functions: dict[str, list[str]] = field(default_factory=dict)
    """The functions of each module, in the order of their first calls."""
    listening: dict[str, list[str]] = field(default_factory=dict)
    """The functions of the listeners, and those that only listeners called, in the same form."""
    answered: list[str] = field(default_factory=list)
    """The modules that had run when the answer with the destinations was written."""
    back_up: set[tuple[str, str]] = field(default_factory=set)
    """The calls to a higher layer: from where, to where."""
    listeners: set[tuple[str, str]] = field(default_factory=set)
    """The calls of listeners, which are in higher layers too."""
    returns: list[str] = field(default_factory=list)
    """From where to where, for the message that has the most. Calls in a row into one module count once."""
    sometimes: list[str] = field(default_factory=list)
    """The modules that ran for some of several requests."""


class _Tracer:
    def __init__(self, walk: Walk) -> None:
        self._walk = walk
        self._layers = layers()
        self._start()

    def _start(self) -> None:
        """Begin to follow a message."""
        self._ran: set[str] = set()
        self._returns: list[str] = []
        self._entered = ""

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        callee = _place(frame) if event == "call" else None
        if callee is None or callee[1].startswith("<"):
            return
        module, name = callee
        callers = list(_callers(frame))
        listens = any(_reports(each) for _, each in (callee, *callers))
        ran = self._walk.listening if listens else self._walk.functions
        functions = ran.setdefault(module, [])
        if name not in functions:
            functions.append(name)
        if callers and self._depth(module) < self._depth(callers[0][0]):
            kind = self._walk.listeners if _reports(name) else self._walk.back_up
            kind.add((".".join(callers[0]), f"{module}.{name}"))
        if not listens:
            self._follow(module, [each for each, _ in callers])

    def _follow(self, module: str, callers: Sequence[str]) -> None:
        """Take in that the message has come to a module. callers: the modules that wait, the last first."""
        if not callers:
            self._start()
        elif module != callers[0]:
            if module in self._ran and module not in (self._entered, *callers):
                self._returns.append(f"{callers[0]} to {module}")
                self._walk.returns = max(self._walk.returns, self._returns, key=len)
            self._entered = module
        self._ran.add(module)

    def _depth(self, module: str) -> int:
        """Return 0 for the highest layer, and more for lower ones."""
        own = f"{module.removeprefix('epp.')}."
        known = (n for n, names in enumerate(self._layers) for name in names if own.startswith(f"{name}."))
        return next(known, len(self._layers))


def _place(frame: FrameType) -> tuple[str, str] | None:
    """Return module and function, or None if the code is not the picker's."""
    module = frame.f_globals.get("__name__", "")
    return (module, frame.f_code.co_qualname) if module.startswith("epp.") else None


def _callers(frame: FrameType) -> Iterator[tuple[str, str]]:
    """Return the functions of the picker that are being run, the innermost first."""
    above = frame.f_back
    while above is not None:
        place = _place(above)
        if place is not None:
            yield place
        above = above.f_back


def _reports(name: str) -> bool:
    """Return whether a function receives the picker's events."""
    return name.rsplit(".", 1)[-1] in _REPORTING


async def walk() -> Walk:
    """Serve requests, trace the last ones, and return what they have in common."""
    picker = picker_of_pods(4)
    metrics = Metrics(decisions=DecisionRing(maxlen=10), state=PickerStatus)
    picker.subscribe(metrics.on_event)
    prompts = Prompts(size_bytes=1000, chunks=1, seed=1)
    found = [Walk() for _ in range(_TRACED)]
    with tempfile.TemporaryDirectory() as folder:
        address = f"unix:{folder}/epp.sock"
        server = ExtProcServer(
            picker,
            listen=Listen(address=address),
            settings=StreamSettings(mode_override=False),
            clock=lambda: _NOW_S,
            gate=Gate(picker),
        )
        await server.start()
        try:
            async with grpc.aio.insecure_channel(address) as channel:
                process: Any = channel.stream_stream(_METHOD)
                for number in range(_REQUESTS):
                    traced = found[number - _REQUESTS] if number >= _REQUESTS - _TRACED else None
                    await _one_request(process, messages_of(prompts, number=number), traced)
        finally:
            await server.stop(0)
    return _in_common(found)


def _in_common(walks: Sequence[Walk]) -> Walk:
    whole = Walk()
    ran = {module for each in walks for module in each.functions}
    every = {module for module in ran if all(module in each.functions for each in walks)}
    whole.sometimes = sorted(ran - every)
    for each in walks:
        whole.back_up |= each.back_up
        whole.listeners |= each.listeners
        whole.listening |= each.listening
    last = walks[-1]
    whole.functions = {module: names for module, names in last.functions.items() if module in every}
    whole.returns = last.returns
    whole.answered = [module for module in last.answered if module in every]
    return whole


async def _one_request(process: Any, messages: tuple[bytes, ...], traced: Walk | None) -> None:
    if traced is not None:
        sys.setprofile(_Tracer(traced))
    try:
        call = process()
        head, body = messages
        await call.write(head)  # the answer to headers may wait for the body
        await call.write(body)
        for _ in messages:
            answer = ext_proc.ProcessingResponse.FromString(await call.read())
        if traced is not None:
            traced.answered = list(traced.functions)
        named = answer.request_body.response.header_mutation.set_headers[0].header.raw_value.decode()
        await call.write(answer_of(named.partition(",")[0]))
        await call.read()
        await call.done_writing()
        while await call.read() is not grpc.aio.EOF:
            pass
    finally:
        sys.setprofile(None)


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    found = asyncio.run(walk())
    for module, functions in found.functions.items():
        mark = " " if module in found.answered else "+"
        print(f"{mark} {module:34} {', '.join(functions)}")
    for module, functions in found.listening.items():
        print(f"  {module:34} {', '.join(functions)} (listening)")
    for module in found.sometimes:
        print(f"  {module:34} (now and then)")
    print(f"{len(found.answered)} modules from the bytes of a request to the bytes of its answer")
    print(f"{len(found.functions)} modules to the end of the stream (+: only after the answer)")
    print(f"{len(found.returns)} returns of one message to a module", *found.returns, sep="\n    ")
    print(f"{len(found.back_up)} calls back up the layers", *sorted(found.back_up), sep="\n    ")
    print(f"{len(found.listeners)} calls of listeners", *sorted(found.listeners), sep="\n    ")


if __name__ == "__main__":
    main()
