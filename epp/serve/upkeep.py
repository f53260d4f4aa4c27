"""Does the work of the picker at regular times, whether requests come or not. `app` starts the loops, and
`sources` keeps them running.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping

from epp.observe.telemetry.metrics import Metrics
from epp.picker.picker import Picker

_log = logging.getLogger("epp")
_HOUSEKEEPING_S = 1.0
_LAG_LOOK_S = 0.1


class Upkeep:
    def __init__(self, picker: Picker, metrics: Metrics, *, overload: Callable[[], float]) -> None:
        """Prepare the loops. overload: the share of new requests that are routed without being read."""
        self._picker = picker
        self._metrics = metrics
        self._overload = overload
        self._overloaded = False
        self._ejected: Mapping[str, str] = {}
        """The servers that the log has reported, and why they are ejected."""

    async def housekeep(self) -> None:
        """Do the picker's housekeeping again and again, also while no request comes."""
        while True:
            await asyncio.sleep(_HOUSEKEEPING_S)
            self._picker.housekeep(now=time.monotonic())
            self.log_ejected(self._who_is_sick(now=time.monotonic()))
            self._metrics.keep({state.endpoint.name for state in self._picker.fleet.states()})
            self._metrics.process.tasks = len(asyncio.all_tasks())

    def _who_is_sick(self, *, now: float) -> Mapping[str, str]:
        ejected = self._picker.news.ejected(now=now)
        lacking = self._picker.fleet.failures.lacking
        return {state.endpoint.name: why for state, why in ejected.items()} | {
            f"{state.endpoint.name}, for the model {model!r},": "it answers 404" for state, model in lacking
        }

    def log_ejected(self, ejected: Mapping[str, str]) -> None:
        """Log one line when a server is ejected, and another when it gets requests again."""
        for name in ejected.keys() - self._ejected.keys():
            _log.warning("%s gets only trial requests: %s", name, ejected[name])
        for name in self._ejected.keys() - ejected.keys():
            _log.info("%s gets requests again", name)
        self._ejected = ejected

    async def watch_lag(self) -> None:
        """Measure how late the event loop runs its timers. Log one line when the overload begins, and one
        when it ends.
        """
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + _LAG_LOOK_S
            await asyncio.sleep(_LAG_LOOK_S)
            self._metrics.process.loop_lag.observe(max(0.0, loop.time() - due))
            before, self._overloaded = self._overloaded, self._overload() > 0
            if self._overloaded and not before:
                _log.warning(
                    "the picker is overloaded and routes a share of the requests by load without reading "
                    "them; add CPU or workers"
                )
            elif before and not self._overloaded:
                _log.info("the picker is no longer overloaded and reads every request again")
