"""Makes one run in one process of locust: its options, its client, its end, and its output. The locust files
import this module. If there are several processes, each worker keeps its own figures and sends all of them
with each of locust's reports. The master adds up the last figures of each worker.
"""

import atexit
import csv
import logging
import time
from pathlib import Path
from typing import Any, ClassVar, Final

import gevent
import msgspec
from locust import User, events
from locust.argument_parser import LocustArgumentParser
from locust.env import Environment
from locust.exception import StopUser
from locust.runners import MasterRunner, WorkerRunner
from locust.stats import PERCENTILES_TO_REPORT, StatsCSV

from bench.load.client import Client
from bench.load.figures import LOOK_S, Figures, RunRecord, together
from bench.load.probe import LoadError, Served, probe
from bench.load.recorder import Recorder
from bench.load.report import generator_lines
from bench.load.sse import Answer, AnswerError, read_answer

_LOG = logging.getLogger(__name__)
_PATH: Final = "/v1/chat/completions"
_ENCODE: Final = msgspec.json.Encoder().encode
_MESSAGE: Final = "prefix_gateway_load"
_SCHEDSTAT: Final = Path("/proc/self/schedstat")


class LoadRun:
    """The state of a run in this process. It is made once, before the users."""

    def __init__(self, environment: Environment) -> None:
        self.environment = environment
        self.recorder = Recorder(environment)
        self.served = Served("", ())
        self.done = False
        """True if nothing is left to send and all answers have come."""
        self.client: Client | None = None
        self._budget = 0
        self._from_workers: dict[str, dict[str, Any]] = {}
        self._in_flight = 0
        self._watching = False

    @property
    def options(self) -> Any:
        return self.environment.parsed_options

    @property
    def worker(self) -> int:
        runner = self.environment.runner
        return max(0, runner.worker_index) if isinstance(runner, WorkerRunner) else 0

    @property
    def figures(self) -> Figures:
        if self._from_workers:
            return together(Figures.of(sent["figures"]) for sent in self._from_workers.values())
        return self.recorder.figures

    def start(self) -> None:
        """Start the run, before the users. End the test if the gateway does not answer."""
        self.done = False
        self._budget = -(-self.options.requests // self.options.generators)
        self.recorder.figures = Figures()
        self._from_workers.clear()
        host = self.environment.host or ""
        try:
            self.served = probe(host, model=self.options.model)
        except LoadError as error:
            _LOG.error("%s", error)
            self._give_up()
            return
        if not isinstance(self.environment.runner, MasterRunner):
            self.client = Client(host, path=_PATH, silence_s=self.options.silence)

    def stop(self) -> None:
        """End the run when the test has ended. The process may run another test."""
        self._watching = False

    def ask(self, name: str, body: dict[str, Any], *, headers: str = "") -> Answer | None:
        """Send and record one request. Return None if it failed. Raise StopUser if the run is over."""
        self._spend()
        if not self.recorder.figures.asked:
            gevent.spawn(self._watch)
        began_at = time.monotonic()
        self.recorder.ask()
        self._in_flight += 1
        assert self.client is not None
        try:
            pieces = self.client.post(_ENCODE(body), headers=headers)
            answer = read_answer(pieces)
        except AnswerError as error:
            self.recorder.failure(name, error, began_at=began_at, ended_at=time.monotonic())
            return None
        finally:
            self._in_flight -= 1
        size = sum(len(piece) for _, piece in pieces)
        self.recorder.answer(name, answer, began_at=began_at, ended_at=pieces[-1][0], size_bytes=size)
        return answer

    def _spend(self) -> None:
        """Use up one of the requests that --requests allows."""
        if not self.options.requests:
            return
        if not self._budget:
            raise StopUser
        self._budget -= 1

    def report(self, data: dict[str, Any]) -> None:
        """Put this worker's figures into a message to the master."""
        data[_MESSAGE] = {"figures": self.recorder.figures.document(), "done": self.done}

    def hear(self, client_id: str, data: dict[str, Any]) -> None:
        """Add a worker's figures to the master's own."""
        if _MESSAGE not in data:
            return
        self._from_workers[client_id] = data[_MESSAGE]
        runner = self.environment.runner
        if all(sent["done"] for sent in self._from_workers.values()) and (
            len(self._from_workers) >= self.options.generators and runner is not None
        ):
            gevent.spawn(runner.quit)

    def finish(self) -> None:
        """Write the figures to their file, and the generator's verdict to the console. Locust calls this at
        the end of the process.
        """
        if isinstance(self.environment.runner, WorkerRunner):
            return
        figures = self.figures
        if self.options.figures:
            settings = {
                "host": self.environment.host,
                "model": self.served.model,
                "users": self.options.num_users,
                "generators": self.options.generators,
                "seed": self.options.seed,
            }
            RunRecord(self.options.label, settings, figures).write(Path(self.options.figures))
        if self.options.csv_prefix:
            # locust's own writer stops up to a second before the last answers,
            # and closes its files after this event.
            atexit.register(_write_csv, self.environment, Path(self.options.csv_prefix))
        print("\n".join(generator_lines(figures)), flush=True)

    def _give_up(self) -> None:
        self.environment.process_exit_code = 3
        if self.environment.runner is not None:
            gevent.spawn(self.environment.runner.quit)

    def _watch(self) -> None:
        """Watch the health of this process until all requests are done or the run ends."""
        health = self.recorder.figures.health
        window = _spent()
        self._watching = True
        while self._watching and not self.done:
            asleep_at = time.monotonic()
            gevent.sleep(LOOK_S)
            if not self._watching:  # a late wake-up now comes from locust writing its report
                return
            health.note_wake(late_s=time.monotonic() - asleep_at - LOOK_S)
            now = _spent()
            if now[0] - window[0] >= 1.0:
                wall_s, cpu_s, waited_s = (b - a for a, b in zip(window, now, strict=True))
                health.note_window(wall_s=wall_s, cpu_s=cpu_s, waited_s=waited_s)
                window = now
            if self.options.requests and not self._budget and not self._in_flight:
                self.end()

    def end(self) -> None:
        """Note that all requests were sent and answered."""
        self.done = True
        runner = self.environment.runner
        if runner is not None and not isinstance(runner, WorkerRunner):
            gevent.spawn(runner.quit)


def _write_csv(environment: Environment, prefix: Path) -> None:
    """Write locust's statistics at the end."""
    final = StatsCSV(environment, PERCENTILES_TO_REPORT)
    parts = {"stats": final.requests_csv, "failures": final.failures_csv, "exceptions": final.exceptions_csv}
    for name, write in parts.items():
        with prefix.with_name(f"{prefix.name}_{name}.csv").open("w", newline="") as file:
            write(csv.writer(file))


def _spent() -> tuple[float, float, float]:
    """Return the time now, the CPU time of this process, and the time for which the process was ready but had
    no core. The last value is 0 if the kernel does not state it.
    """
    try:
        waited_s = int(_SCHEDSTAT.read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        waited_s = 0.0
    return time.monotonic(), time.process_time(), waited_s


class LoadUser(User):
    """A user of the gateway. Subclasses define the requests."""

    abstract = True
    run_of_process: ClassVar[LoadRun]

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        self.load = self.run_of_process


@events.init_command_line_parser.add_listener
def _add_options(parser: LocustArgumentParser) -> None:
    group = parser.add_argument_group("prefix-gateway load")
    group.add_argument(
        "--model", default="", help="model that requests name (default: the first one that the gateway lists)"
    )
    group.add_argument("--seed", type=int, default=1, help="seed of all prompts (default 1)")
    group.add_argument(
        "--salt",
        default="",
        help="cache_salt of every request; a new salt makes the run start with empty caches",
    )
    group.add_argument(
        "--requests",
        type=int,
        default=0,
        help="end after this many requests, when all answers have come (default: end by time)",
    )
    group.add_argument(
        "--think", type=float, default=1.0, help="multiply all think times by this number (default 1)"
    )
    group.add_argument("--prefixes", type=int, default=32, help="number of shared beginnings (default 32)")
    group.add_argument(
        "--prefix-tokens",
        type=int,
        default=1500,
        help="approximate length of each shared beginning, in tokens (default 1500)",
    )
    group.add_argument(
        "--answer-tokens", type=int, default=60, help="length of each answer, in tokens (default 60)"
    )
    group.add_argument(
        "--silence",
        type=float,
        default=120.0,
        help="count a request as failed after this many seconds without a byte",
    )
    group.add_argument(
        "--generators", type=int, default=1, help="number of worker processes that share the load (default 1)"
    )
    group.add_argument("--label", default="load", help="name of this run in the report")
    group.add_argument("--figures", default="", help="file for the run's figures (JSON)")


@events.init.add_listener
def _init(environment: Environment, **_: Any) -> None:
    run = LoadRun(environment)
    LoadUser.run_of_process = run
    environment.events.test_start.add_listener(lambda **_: run.start())
    environment.events.test_stop.add_listener(lambda **_: run.stop())
    environment.events.quitting.add_listener(lambda **_: run.stop())
    environment.events.report_to_master.add_listener(lambda client_id, data: run.report(data))
    environment.events.worker_report.add_listener(run.hear)
    environment.events.quit.add_listener(lambda exit_code: run.finish())
