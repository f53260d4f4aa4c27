"""Runs the thread that follows the servers' KV events and maps routed prompts, and passes its findings to the
picker.

Owns the sockets. Each server has a subscription, and a DEALER socket during a replay. Each replay has a new
socket, so that no message of an earlier replay arrives on it. `sequence` and `exact` make all decisions. The
picker belongs to the event loop, so findings are passed to it there, in portions. The only object of the loop
that the thread uses is the queue of prompts, which is made for this.

Exact mode improves the table, but the picker does not need it. An unexpected error, in the thread or in its
findings, turns exact mode off and ends `run` with this error. The states show the reason. The picker goes on
with its table as it is. The next `run` starts with a new `Exact` and knows nothing of the previous one.
Called by the composition root, which runs it again after a pause.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

import zmq

from epp.base.types import Endpoint, EndpointName
from epp.picker.picker import Picker
from epp.picker.prefix_index.reported import ExactModelStatus, ExactServerStatus, ExactStatus, KvReport
from epp.sources.kvevents import sockets
from epp.sources.kvevents.exact import Exact
from epp.sources.kvevents.routed_prompts import RoutedPrompts
from epp.sources.kvevents.sequence import Sequence as Messages
from epp.sources.kvevents.sequence import Step
from epp.sources.kvevents.sockets import EventSource, Followed

_log = logging.getLogger(__name__)

_POLL_MS: Final = 50
_REPLAY_TIMEOUT_S: Final = 5.0
"""A replay has failed if no message of it comes for this time."""
_MESSAGES_A_TURN: Final = 64
"""Most messages read from one socket before the others get their turn."""
_PROMPTS_A_TURN: Final = 4
_FINDINGS_A_TURN: Final = 64
"""Most findings that are applied to the table before requests get their turn. Each takes some 5 us."""
_LOOK_EVERY_S: Final = 0.5
"""How often the thread looks for new servers, tries those again that it could not listen to, and writes the
status."""
_MOST_FOUND: Final = 20_000
"""Most findings that wait for the event loop. With more, the thread waits too, and messages wait in the
sockets."""
_STOP_S: Final = 10.0
"""The end of the process waits no longer than this for the tokenizer."""


class ExactService:
    def __init__(
        self,
        picker: Picker,
        queue: RoutedPrompts,
        make_exact: Callable[[], Exact],
        *,
        topic: str,
        source: Callable[[Endpoint], EventSource | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._picker = picker
        self._queue = queue
        self._make_exact = make_exact
        self._exact = make_exact()
        self._topic = topic
        self.source = source
        self._clock = clock
        self._wanted: Mapping[EndpointName, EventSource] = {}
        """The loop replaces this mapping as a whole, and the thread reads it."""
        self._found: deque[KvReport] = deque()
        self._failure: BaseException | None = None
        """The error that ended the thread."""
        self._runs = 0
        self._context: sockets.Context
        self._poller: zmq.Poller
        self._followed: dict[EndpointName, Followed] = {}
        """Each thread makes these three, and closes them."""
        self._unreachable: dict[EndpointName, str] = {}
        """Why the events of a server cannot be followed."""
        self._logged: dict[str, str] = {}
        self._counted = (0, 0)
        """Gaps and losses of servers that are no longer followed."""
        self.status = ExactStatus(models={}, servers={}, gaps={"found": 0, "lost": 0}, malformed=0)
        """The status, at most half a second old. The thread replaces the status as a whole."""

    @property
    def dropped(self) -> int:
        """Number of prompts that were skipped because too many waited."""
        return self._queue.dropped

    def set_endpoints(self, endpoints: Sequence[Endpoint]) -> None:
        found = ((endpoint.name, self.source(endpoint)) for endpoint in endpoints)
        self._wanted = {name: source for name, source in found if source is not None}

    async def run(self) -> None:
        """Run until cancelled, or until an unexpected error. The error is raised once exact mode is off."""
        self._begin()
        loop, news, stopping = asyncio.get_running_loop(), asyncio.Event(), threading.Event()
        thread = threading.Thread(
            target=self._run_thread,
            args=(lambda: loop.call_soon_threadsafe(news.set), stopping),
            name="kv-events",
            daemon=True,
        )
        thread.start()
        try:
            while self._failure is None:
                await news.wait()
                news.clear()
                await self._apply()
        except Exception as error:  # noqa: BLE001 - it is raised again below
            self._failure = error
        except asyncio.CancelledError:
            stopping.set()
            thread.join(_STOP_S)  # the thread does not see the flag while it tokenizes a prompt
            raise
        stopping.set()
        self._turn_off(self._failure)
        while thread.is_alive():  # noqa: ASYNC110 - a thread sets no asyncio event
            await asyncio.sleep(_POLL_MS / 1000)
        raise self._failure

    def _begin(self) -> None:
        """Start without anything of an earlier run, which may contain the cause of the error."""
        self._runs += 1
        if self._runs > 1:
            self._exact, self._failure = self._make_exact(), None
            self._unreachable, self._logged, self._counted = {}, {}, (0, 0)
            self._found.clear()
            self._queue.open()

    def _turn_off(self, failure: BaseException) -> None:
        """Follow no server, and take no prompts of the picker any more."""
        self._queue.close()
        self._found.clear()
        reason = f"failed: {type(failure).__name__}: {failure}"
        status = self.status
        off = ExactModelStatus(state="off", reason=reason, prompts={})
        self.status = replace(
            status,
            models={name: replace(m, state="off", reason=reason) for name, m in status.models.items()}
            or {"": off},
            servers={
                name: replace(s, state="off", reason=reason, blocks=0) for name, s in status.servers.items()
            },
        )

    async def _apply(self) -> None:
        found = self._found
        while found:
            portion = [found.popleft() for _ in range(min(len(found), _FINDINGS_A_TURN))]
            self._picker.take_in(portion)
            await asyncio.sleep(0)

    # -- the thread ------------------------------------------------------------------------------------------

    def _run_thread(self, wake: Callable[[], object], stopping: threading.Event) -> None:
        self._context, self._poller, self._followed = sockets.new_context(), zmq.Poller(), {}
        try:
            self._follow(wake, stopping)
        except BaseException as error:  # noqa: BLE001 - a panic of the tokenizers package is no Exception; `run` raises this error
            if not stopping.is_set():
                self._failure = error
                wake()
        finally:
            for one in self._followed.values():
                one.close(self._poller)
            self._context.term()

    def _follow(self, wake: Callable[[], object], stopping: threading.Event) -> None:
        look_at = self._clock()
        while not stopping.is_set():
            if len(self._found) > _MOST_FOUND:
                stopping.wait(_POLL_MS / 1000)
                continue
            now = self._clock()
            if now >= look_at:
                look_at = now + _LOOK_EVERY_S
                self._resubscribe()
                self._reconcile()
                self._publish_status()
            readable = {socket for socket, _ in self._poller.poll(_POLL_MS if not len(self._queue) else 0)}
            now = self._clock()
            for one in self._followed.values():
                if one.replay is not None and one.replay in readable:
                    self._read_replay(one, now=now)
                if one.sub.socket in readable:
                    self._read_live(one, now=now)
                self._tend_replay(one, now=now)
            self._look_at_prompts(now=now)
            found = self._exact.findings(now=now)
            if found:
                self._found.extend(found)
                wake()

    def _reconcile(self) -> None:
        wanted, followed = self._wanted, self._followed
        self._unreachable = {}
        for one in [one for name, one in followed.items() if wanted.get(name) != one.source]:
            self._drop(one)
        for name, source in wanted.items():
            sub = self._subscribed(name, source) if name not in followed else None
            if sub is not None:
                followed[name] = Followed(name, source, Messages(replays=bool(source.replay)), sub)
                self._exact.add(name, model=source.model)

    def _subscribed(self, name: EndpointName, source: EventSource) -> sockets.Subscription | None:
        """Return a socket. None: no file descriptor is left, or the address is wrong; the reason is kept."""
        try:
            sub = sockets.Subscription(self._context, source.events, topic=self._topic)
        except zmq.ZMQError as error:
            self._unreachable[name] = f"{source.events}: {zmq.strerror(error.errno or 0)}"
            return None
        self._poller.register(sub.socket, zmq.POLLIN)
        return sub

    def _resubscribe(self) -> None:
        """Subscribe again where a connection has ended. Missed messages show as a gap."""
        for one in [one for one in self._followed.values() if one.sub.read_out()]:
            one.unsubscribe(self._poller)
            sub = self._subscribed(one.name, one.source)
            if sub is not None:
                one.sub = sub
            else:
                self._drop(one)

    def _drop(self, gone: Followed) -> None:
        del self._followed[gone.name]
        self._counted = self._counted[0] + gone.messages.gaps, self._counted[1] + gone.messages.lost
        gone.close(self._poller)
        self._exact.drop(gone.name)

    def _read_live(self, one: Followed, *, now: float) -> None:
        for _ in range(_MESSAGES_A_TURN):
            frames = sockets.receive(one.sub.socket)
            if frames is None:
                return
            if len(frames) != 3 or len(frames[1]) != 8:
                self._exact.malformed += 1
            elif not self._topic or frames[0] == self._topic.encode():  # ZeroMQ also passes longer topics
                steps = one.messages.live(int.from_bytes(frames[1], "big"), frames[2])
                self._apply_steps(one, steps, now=now)

    def _read_replay(self, one: Followed, *, now: float) -> None:
        for _ in range(_MESSAGES_A_TURN):
            frames = sockets.receive(one.replay) if one.replay is not None else None
            if frames is None or one.asked != one.messages.asked:
                return
            if len(frames) != 4 or len(frames[2]) != 8:
                continue
            one.give_up_at = now + _REPLAY_TIMEOUT_S
            if frames[2] == sockets.END_OF_REPLAY:
                self._apply_steps(one, one.messages.replay_over(), now=now)
                return
            steps = one.messages.replayed(int.from_bytes(frames[2], "big"), frames[3])
            self._apply_steps(one, steps, now=now)

    def _apply_steps(self, one: Followed, steps: Sequence[Step], *, now: float) -> None:
        self._exact.apply(one.name, steps, complete=one.messages.complete, now=now)

    def _tend_replay(self, one: Followed, *, now: float) -> None:
        """Request missing messages, and give up requests that are not answered."""
        messages = one.messages
        if messages.due is not None and one.asked == messages.asked and now >= one.give_up_at:
            self._apply_steps(one, messages.replay_over(), now=now)
        if messages.due is None:
            one.close_replay(self._poller)
        elif one.asked != messages.asked:
            one.close_replay(self._poller)
            one.asked, one.give_up_at = messages.asked, now + _REPLAY_TIMEOUT_S
            try:
                one.replay = sockets.open_socket(self._context, zmq.DEALER, one.source.replay)
            except zmq.ZMQError:
                one.give_up_at = now
                return
            self._poller.register(one.replay, zmq.POLLIN)
            one.replay.send_multipart([b"", messages.due.to_bytes(8, "big")], zmq.NOBLOCK)

    def _look_at_prompts(self, *, now: float) -> None:
        for _ in range(_PROMPTS_A_TURN):
            routed = self._queue.take()
            if routed is None:
                return
            if self._exact.routed(routed, now=now):
                one = self._followed[routed.server]
                self._apply_steps(one, one.messages.restarted(), now=now)

    def _publish_status(self) -> None:
        gaps, lost = self._counted
        messages = [one.messages for one in self._followed.values()]
        unreachable = {
            name: ExactServerStatus(
                state="off", reason=f"cannot receive events: {reason}", blocks=0, events=0
            )
            for name, reason in self._unreachable.items()
        }
        self.status = ExactStatus(
            models=self._exact.models(),
            servers={**self._exact.servers(), **unreachable},
            gaps={
                "found": gaps + sum(each.gaps for each in messages),
                "lost": lost + sum(each.lost for each in messages),
            },
            malformed=self._exact.malformed,
        )
        lines = {}
        for name, model in self.status.models.items():
            lines[f"model {name or '(any)'}"] = _words(model.state, model.reason)
        for name, error in self._exact.last_errors().items():
            lines[f"a prompt of model {name or '(any)'}"] = f"skipped: {error}"
        lines |= {f"server {name}": _words(s.state, s.reason) for name, s in self.status.servers.items()}
        for what, words in lines.items():
            if self._logged.get(what) != words:
                level = logging.WARNING if words.startswith(("off", "skipped")) else logging.INFO
                _log.log(level, "exact mode, %s: %s", what, words)
        self._logged = lines


def _words(state: str, reason: str) -> str:
    return f"{state}: {reason}" if reason else state
