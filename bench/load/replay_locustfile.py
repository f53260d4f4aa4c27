"""Replays a trace in an open loop. Requests are sent at the trace's moments, whatever the answers do, and are
timed from those moments.

One user for each generator process does all of it:
`locust -f bench/load/replay_locustfile.py -u 1 --trace FILE`, from the repository's root, or
`python -m bench.load replay`.
"""

from __future__ import annotations

import time
from pathlib import Path

import gevent
from gevent.pool import Group
from locust import task
from locust.exception import StopUser

from bench.load import prompts, trace
from bench.load.locust_run import LoadUser
from bench.load.schedule import Due, Schedule, share

_LOOK_S = 0.2
_GENERATED = 300


class ReplayUser(LoadUser):
    _ending = False

    def on_start(self) -> None:
        options = self.load.options
        if options.trace:
            calls = trace.read(Path(options.trace))
        else:
            calls = trace.generated(options.requests or _GENERATED, seed=options.seed)
        prepared = trace.prepared(
            calls, most=options.requests, speed=options.trace_speed, scale=options.trace_scale
        )
        self.calls = share(prepared, worker=self.load.worker, workers=options.generators)
        self.piece_tokens = max(1, round(trace.BLOCK_TOKENS * options.trace_scale))

    @task
    def replay(self) -> None:
        schedule = Schedule(self.calls, started_at=time.monotonic())
        sending = Group()
        try:
            while not schedule.finished and not self._ending:
                for due in schedule.take(now=time.monotonic()):
                    sending.start(gevent.Greenlet(self._send, due))
                if not schedule.finished:
                    gevent.sleep(min(_LOOK_S, schedule.wait_s(now=time.monotonic())))
            sending.join()
        finally:
            sending.kill(block=False)
        self.load.end()
        raise StopUser

    def stop(self, force: bool = False) -> bool:  # noqa: FBT001, FBT002 - locust's own signature
        self._ending = True
        return bool(super().stop(force))

    def _send(self, due: Due) -> None:
        self.load.ask("replay", self._body(due.call), due_at=due.due_at)

    def _body(self, call: trace.Call) -> dict[str, object]:
        options = self.load.options
        left, whole, pieces = call.prompt_tokens, self.piece_tokens, []
        for block in call.blocks:
            tokens = max(1, min(whole, left))
            pieces.append(prompts.block_text(block, tokens, whole_tokens=whole, seed=options.seed))
            left -= tokens
        return prompts.chat(
            self.load.served.model,
            [{"role": "user", "content": " ".join(pieces)}],
            answer_tokens=call.output_tokens,
            salt=options.salt,
        )
