"""Keeps loops that read from outside running: scrapes, files, the API server, other pickers, KV events,
housekeeping.

Such a loop reads what others wrote, so it can fail unexpectedly. A failure must never end the picker:
`Sources.keep` runs the loop again after a pause, logs the reason and counts the failure. The pause doubles
with each failure, up to half a minute, and is short again after the loop has run well for a while. Only a
failure of the serving socket ends the process.

The composition root owns the only `Sources` and passes its `keep` to the adapters that have loops of their
own.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from random import Random
from typing import Any, Final, NoReturn

from epp.base.errors import ConfigError

_log = logging.getLogger(__name__)

_FIRST_PAUSE_S: Final = 0.2
_LONGEST_PAUSE_S: Final = 30.0
_RAN_WELL_S: Final = 60.0
"""A source that ran for this long before it failed is started again after a short pause."""


Keep = Callable[[str, Callable[[], Awaitable[None]]], Coroutine[Any, Any, NoReturn]]
"""Runs the function for ever: starts it again whenever it ends. The text is a label for metrics, from a small
fixed set.
"""


class Pauses:
    """Computes the pause before the next try: twice as long each time, with a random part."""

    def __init__(
        self, rng: Random, *, first_s: float = _FIRST_PAUSE_S, longest_s: float = _LONGEST_PAUSE_S
    ) -> None:
        self._rng = rng
        self._first_s = first_s
        self._longest_s = longest_s
        self._tries = 0

    def next_s(self) -> float:
        bound = min(self._longest_s, self._first_s * 2**self._tries)
        self._tries = min(self._tries + 1, 32)
        return float(bound * self._rng.uniform(0.5, 1.0))

    def reset(self) -> None:
        self._tries = 0


class Sources:
    """Keeps loops running. `failures` counts failures by source, for metrics."""

    def __init__(self, *, rng: Random, first_pause_s: float = _FIRST_PAUSE_S) -> None:
        self._rng = rng
        self._first_pause_s = first_pause_s
        self.failures: Counter[str] = Counter()
        self._last: dict[str, tuple[float, str]] = {}
        """When each loop failed last, and why. Each failure takes out those of over a minute ago."""

    async def keep(self, source: str, run: Callable[[], Awaitable[None]], /) -> NoReturn:
        """Run `run` again and again until this task is cancelled. KeyboardInterrupt and SystemExit pass
        through.
        """
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None, "a coroutine runs in a task"
        pauses = Pauses(self._rng, first_s=self._first_pause_s)
        self.failures[source] += 0  # the metric exists before the first failure
        while True:
            started = loop.time()
            failure: BaseException | None = None
            try:
                await run()
            except (KeyboardInterrupt, SystemExit, GeneratorExit):
                raise
            except asyncio.CancelledError as error:
                if task.cancelling():
                    del task  # a task that its own frame names stays until the garbage collector comes
                    raise
                failure = error  # a library cancelled a part of the loop
            except BaseException as error:  # noqa: BLE001 - some packages raise what is no Exception; the picker goes on
                failure = error
            if loop.time() - started >= _RAN_WELL_S:
                pauses.reset()
            pause_s = pauses.next_s()
            self.failures[source] += 1
            reason = "it returned" if failure is None else f"{type(failure).__name__}: {failure}"[:500]
            self._last[task.get_name()] = loop.time(), reason
            # Named by no variable: the frame of each loop would keep it, and hundreds may fail together.
            self._last = {name: one for name, one in self._last.items() if loop.time() - one[0] < _RAN_WELL_S}
            _log_failure(task.get_name(), source, failure, reason, pause_s=pause_s)
            await asyncio.sleep(pause_s)

    def failing(self, *, now: float) -> list[str]:
        """Return the loops that failed within the last minute, each with the reason."""
        return [f"{name}: {why}" for name, (at, why) in self._last.items() if now - at < _RAN_WELL_S]


def _log_failure(
    name: str, source: str, failure: BaseException | None, reason: str, *, pause_s: float
) -> None:
    expected = failure is None or isinstance(failure, ConfigError)
    _log.error(
        "%s failed and starts again in %.1f s; the data that it read before stays in use: %s",
        name,
        pause_s,
        reason,
        exc_info=None if expected else failure,
        extra={"source": source},
    )
