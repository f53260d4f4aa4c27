"""Starts locust as a process of its own for one run, and reads its figures.

A run leaves in its directory: `locust.html`, `locust_*.csv`, `locust.log` and `figures.json`.
"""

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Final

from bench.load.figures import RunRecord
from bench.load.probe import LoadError
from bench.load.report import generator_lines

_HERE: Final = Path(__file__).resolve().parent
_ROOT: Final = _HERE.parents[1]
SCENARIOS: Final = {
    "chat": "ChatUser",
    "shared": "SharedPrefixUser",
    "conversation": "ConversationUser",
    "lora": "LoraUser",
}
_STOP_WITHIN_S: Final = 60
"""The time that unfinished answers get at the end."""
_TAIL_LINES: Final = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One run. If `time_s` is 0, it lasts until `requests` are answered."""

    scenario: str
    host: str
    users: int
    spawn_per_s: float
    time_s: int
    processes: int
    label: str
    directory: Path
    options: Sequence[str]
    """Further options of the locust file or of locust itself."""

    def command(self) -> list[str]:
        command = [
            sys.executable,
            "-m",
            "locust",
            "-f",
            str(_HERE / "locustfile.py"),
            SCENARIOS[self.scenario],
            "--headless",
            "--only-summary",
        ]
        command += [
            "--host",
            self.host,
            "-u",
            str(self.users),
            "-r",
            str(self.spawn_per_s),
        ]
        command += ["-t", f"{self.time_s}s"] if self.time_s else []
        command += ["-s", str(_STOP_WITHIN_S), "--generators", str(self.processes)]
        if self.processes > 1:
            command += ["--processes", str(self.processes), *_own_port()]
        command += ["--html", str(self.directory / "locust.html"), "--csv", str(self.directory / "locust")]
        command += ["--figures", str(self.figures_file), "--label", self.label]
        return [*command, *self.options]

    @property
    def figures_file(self) -> Path:
        return self.directory / "figures.json"

    @property
    def log_file(self) -> Path:
        return self.directory / "locust.log"


def _own_port() -> list[str]:
    """Return a port for locust's own messages: two runs on one machine would share the standard one."""
    from tests.harness.ports import free_port  # noqa: PLC0415 - only several processes need this

    port = str(free_port())
    return ["--master-bind-host", "127.0.0.1", "--master-bind-port", port, "--master-port", port]


def run(plan: Plan) -> RunRecord:
    """Make the run to its end. Raise LoadError if it left no figures."""
    plan.directory.mkdir(parents=True, exist_ok=True)
    plan.figures_file.unlink(missing_ok=True)
    status = _to_its_end(plan)
    if not plan.figures_file.exists():
        tail = "\n".join(plan.log_file.read_text(errors="replace").splitlines()[-_TAIL_LINES:])
        raise LoadError(
            f"locust ended with status {status} and left no figures. The end of its output:\n{tail}"
        )
    record = RunRecord.read(plan.figures_file)
    if not record.figures.asked:
        tail = "\n".join(plan.log_file.read_text(errors="replace").splitlines()[-_TAIL_LINES:])
        raise LoadError(f"no request was sent. The end of locust's output:\n{tail}")
    _mark(plan.directory / "locust.html", record)
    return record


def _to_its_end(plan: Plan) -> int:
    """Run locust to its end. Return its exit status."""
    with plan.log_file.open("wb") as log:
        # Locust stays in the same process group. So Ctrl-C reaches locust too, which then ends the run and
        # writes its files.
        popen = subprocess.Popen(plan.command(), cwd=_ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            status = popen.wait()
        except KeyboardInterrupt:
            status = popen.wait(timeout=_STOP_WITHIN_S + 30)
        finally:
            if popen.poll() is None:
                popen.kill()
                popen.wait()
    return status


def _mark(file: Path, record: RunRecord) -> None:
    """Write the generator's verdict into locust's report too."""
    if not file.exists():
        return
    colour = "#cf222e" if record.figures.verdict else "#1a7f37"
    text = "<br>".join(escape(line) for line in generator_lines(record.figures))
    banner = (
        f'<div style="padding:10px 16px;font:14px sans-serif;color:#fff;background:{colour}">{text}</div>'
    )
    document = file.read_text()
    where = document.find(">", document.rfind("<body")) + 1  # scripts before the body contain `<body` too
    file.write_text(document[:where] + banner + document[where:])
