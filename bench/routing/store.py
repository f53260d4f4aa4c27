"""A file of results that grows: a long comparison can be stopped and gone on with,
and rules that did not change are not run again.

One JSON object in a line, of one run: what was run, then its row. The last line of a run counts. A run is the
same when rule, workload, load, seed, fleet and measured capacity are; whoever changes a comparison rule or
the simulator begins a new file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.routing.bench import Result, Run, Setting
from bench.routing.workloads import label
from epp.replay.measure import Row


@dataclass(frozen=True, slots=True)
class Store:
    path: Path

    def results(self) -> list[Result]:
        """All runs, each once."""
        if not self.path.exists():
            return []
        kept = {}
        for line in self.path.read_text().splitlines():
            result = _result_of(line)
            kept[result.run] = result
        return list(kept.values())

    def missing(self, runs: Sequence[Run], *, anew: Iterable[str]) -> list[Run]:
        """Those of `runs` that are not in the file, and all of the rules `anew`."""
        changing = set(anew)
        known = {result.run for result in self.results() if result.run.rule not in changing}
        return [run for run in runs if named(run) not in known]

    def keeping(self, results: Iterable[Result]) -> Iterator[Result]:
        """The same results, each written down before it is handed on."""
        with self.path.open("a") as file:
            for result in results:
                file.write(_line_of(result) + "\n")
                file.flush()
                yield result


def named(run: Run) -> Run:
    """With a trace by its name, wherever its file is."""
    return Run(
        workload=label(run.workload),
        rule=run.rule,
        load=run.load,
        seed=run.seed,
        setting=run.setting,
        capacity_per_s=run.capacity_per_s,
        unloaded_s=run.unloaded_s,
    )


def _line_of(result: Result) -> str:
    return json.dumps({"run": asdict(named(result.run)), "row": asdict(result.row)})


def _result_of(line: str) -> Result:
    item = json.loads(line)
    run = item["run"]
    return Result(
        run=Run(**{**run, "setting": Setting(**run["setting"])}), row=Row(**item["row"]), wall_s=0.0
    )
