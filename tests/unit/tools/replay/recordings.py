"""Recordings made by the real picker and recorder, for the tests of replay."""

import json
import random
from pathlib import Path

from msgspec.structs import replace

from bench.routing.bench import shape_of
from bench.routing.picker_router import PickerRouter
from bench.routing.rows import Row, row_of
from bench.routing.workloads import SPECS, OpenLoop
from epp.config.policy import DEFAULT_POLICY, PolicySpec, RuleName
from epp.observe.recording import Line, encode, line_of, opening_of, servers_of
from epp.picker.picker import Picker
from epp.request.response import ResponseFeedback
from model_server.sim.fleet import Fleet, FleetPlan
from tests.unit.picker.picker_questions import a_picker, ask, text


def record(path: Path, *, requests: int = 120, seed: int = 1, rule: str = "least-cost") -> None:
    """Make conversations of twelve users with four shared beginnings, half a second apart. Every tenth
    answer is sampled.
    """
    rng = random.Random(seed)
    picker = a_picker(PolicySpec(rule=rule), on=())  # type: ignore[arg-type]
    lines: list[Line] = []
    said = [text(f"system {n % 4}", 6000) for n in range(12)]
    for n in range(requests):
        user, now = rng.randrange(12), n * 0.5
        said[user] += text(f"turn {n}", 700)
        pick = picker.pick(ask(said[user], stream=True), now=now)
        picker.on_response_headers(pick, status=200, served=pick.destinations[0], now=now + 0.05)
        if n % 10 == 0:
            told = ResponseFeedback(
                first_token_at=now + 0.2, prompt_tokens=len(said[user]) // 4, completion_tokens=50
            )
            picker.on_feedback(pick, told, now=now + 1.2)
        picker.end(pick, outcome="ended", now=now + 1.2)
        lines.append(line_of(pick, unix_now_s=1000.0 + now + 1.2, key=b"k"))
    write(path, picker, lines)


def write(path: Path, picker: Picker, lines: list[Line]) -> None:
    path.write_bytes(b"".join(map(encode, [opening_of(picker), servers_of(picker), *lines])))


class _RecordingRouter(PickerRouter):
    """Notes every request that is over, as the listener of a picker does."""

    def __init__(self, rule: RuleName) -> None:
        policy = replace(DEFAULT_POLICY, spec=replace(DEFAULT_POLICY.spec, rule=rule))
        super().__init__(policy, seed=1)
        self.lines: list[Line] = []

    def ended(self, request_id: int, *, failed: bool, cached_tokens: int, now: float) -> None:
        pick = self._open[request_id].pick
        super().ended(request_id, failed=failed, cached_tokens=cached_tokens, now=now)
        self.lines.append(line_of(pick, unix_now_s=now, key=b"k"))


def record_simulation(path: Path, *, requests: int, rule: RuleName = "least-cost") -> Row:
    """Record what a simulated fleet does, as a gateway would. Return the fleet's own figures."""
    spec = SPECS["b2b"]
    assert spec.make is not None
    router = _RecordingRouter(rule)
    workload = OpenLoop(spec.make(random.Random(1), requests), rate_per_s=2.5)
    plan = FleetPlan(shape=shape_of(spec), num_servers=4, horizon_s=3600.0)
    outcome = Fleet(plan, router=router, workload=workload, rng=random.Random(1)).run()
    picker = router.pickers[0]
    write(path, picker, router.lines)
    return row_of(outcome)


def recording_file(folder: Path) -> Path:
    """Return the file of a new recording."""
    path = folder / "recording.jsonl"
    record(path)
    return path


def json_lines(*rows: object) -> str:
    """Return the content of a file with one row in each line."""
    return "".join(json.dumps(row) + "\n" for row in rows)
