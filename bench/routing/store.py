"""Keeps results in a growing file. A long comparison can be stopped and continued, and rules that did not
change are not run again.

Each line is one JSON object with one run: first its settings, then its row. If a run has several lines, the
last one counts. Two runs are the same if rule, workload, load, seed, fleet and measured capacity are equal.
After a change of a comparison rule or of the simulator, begin a new file. A line also has a digest of the
picker's code, so runs of our own rules stay valid until that code changes.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import epp
from bench.routing.bench import Result, Run, Setting
from bench.routing.rows import Row
from bench.routing.workloads import label


@dataclass(frozen=True, slots=True)
class Store:
    path: Path
    code: str = ""
    """The digest of the picker's code, as `code_of` gives it. An empty digest means that it is unknown, so
    the run matches no code.
    """

    def results(self) -> list[Result]:
        """Return all runs, each once."""
        return [result for result, _ in self._kept().values()]

    def _kept(self) -> dict[Run, tuple[Result, str]]:
        """Return the last result of each run, and the digest of the picker's code that made it."""
        if not self.path.exists():
            return {}
        lines = map(json.loads, self.path.read_text().splitlines())
        return {(result := _result_of(line)).run: (result, line.get("code", "")) for line in lines}

    def missing(self, runs: Sequence[Run], *, anew: Iterable[str]) -> list[Run]:
        """Return the runs that are not in the file, and the runs of the rules `anew` that another version of
        the code made.
        """
        changing = set(anew)
        known = {
            run
            for run, (_, code) in self._kept().items()
            if run.rule not in changing or (code and code == self.code)
        }
        return [run for run in runs if named(run) not in known]

    def keeping(self, results: Iterable[Result]) -> Iterator[Result]:
        """Yield the results unchanged. Each result is written to the file before it is passed on."""
        with self.path.open("a") as file:
            for result in results:
                file.write(_line_of(result, code=self.code) + "\n")
                file.flush()
                yield result


def named(run: Run) -> Run:
    """Return the run with the name of its trace, wherever the file of the trace is."""
    return replace(run, workload=label(run.workload))


def code_of(package: Path = Path(epp.__file__).parent) -> str:
    """Return a digest of a package's Python files."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _line_of(result: Result, *, code: str) -> str:
    return json.dumps({"run": asdict(named(result.run)), "row": asdict(result.row), "code": code})


def _result_of(item: dict[str, Any]) -> Result:
    run = item["run"]
    return Result(run=Run(**{**run, "setting": Setting(**run["setting"])}), row=Row(**item["row"]))
