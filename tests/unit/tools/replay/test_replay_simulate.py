"""`epp replay`: recordings become a trace, which the real picker gets on simulated servers."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from bench.routing import picker_router
from bench.routing.bench import shape_of
from bench.routing.rows import Row, row_of
from bench.routing.workloads import SPECS, OpenLoop
from epp.base.errors import ConfigError
from epp.config.policy import DEFAULT_POLICY, PolicySpec, RuleName
from epp.observe.recording import Line, RecordedRequest, encode, line_of, opening_of, servers_of
from epp.picker.events import Ended, PickerEvent
from epp.picker.picker import Picker
from epp.request.response import ResponseFeedback
from epp.serve import cli
from epp.tools.replay.reading import read
from epp.tools.replay.simulate import PickerRouter, RecordedServer, Trace, run
from model_server.sim.fleet import Fleet, FleetPlan
from model_server.sim.prompts import Segment
from model_server.sim.request import SimRequest
from tests.unit.picker.picker_questions import a_picker, ask, endpoints, text


def record(path: Path, *, requests: int = 120, seed: int = 1, rule: str = "least-cost") -> None:
    """Make conversations of twelve users with four shared beginnings, half a second apart. Every tenth
    answer is sampled.
    """
    rng = random.Random(seed)
    picker = a_picker(PolicySpec(rule=rule), on=())  # type: ignore[arg-type]
    lines: list[Line] = []
    histories = [text(f"system {n % 4}", 6000) for n in range(12)]
    for n in range(requests):
        user, now = rng.randrange(12), n * 0.5
        histories[user] += text(f"turn {n}", 700)
        pick = picker.pick(ask(histories[user], stream=True), now=now)
        picker.on_response_headers(pick, status=200, served=pick.destinations[0], now=now + 0.05)
        if n % 10 == 0:
            feedback = ResponseFeedback(
                first_token_at=now + 0.2, prompt_tokens=len(histories[user]) // 4, completion_tokens=50
            )
            picker.on_feedback(pick, feedback, now=now + 1.2)
        picker.end(pick, outcome="ended", now=now + 1.2)
        lines.append(line_of(pick, unix_now_s=1000.0 + now + 1.2, key=b"k"))
    write(path, picker, lines)


def write(path: Path, picker: Picker, lines: list[Line]) -> None:
    path.write_bytes(b"".join(map(encode, [opening_of(picker), servers_of(picker), *lines])))


class RecordingRouter(picker_router.PickerRouter):
    """Notes every request that is over, as the listener of a picker does."""

    def __init__(self, rule: RuleName) -> None:
        policy = structs.replace(DEFAULT_POLICY, spec=structs.replace(DEFAULT_POLICY.spec, rule=rule))
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
    router = RecordingRouter(rule)
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


def a_trace(tmp_path: Path) -> Trace:
    return read([recording_file(tmp_path)])


def test_the_same_replay_gives_the_same_figures(tmp_path: Path) -> None:
    trace = a_trace(tmp_path)
    first, second = (run(trace, DEFAULT_POLICY) for _ in range(2))
    assert first == second
    assert first.counted == 108, "the first tenth warms the caches"
    assert first.failed == 0


@pytest.mark.parametrize("bytes_per_token", [3.7, 4.0, 4.3])
@pytest.mark.parametrize("shared", [1, 2, 7])
def test_prompts_share_as_many_chunks_as_when_recorded(
    tmp_path: Path, shared: int, bytes_per_token: float
) -> None:
    prompts = [text("shared", shared * 256) + text(f"own {n}", 900) for n in range(2)]
    picker, lines = a_picker(on=endpoints("a")), list[RecordedRequest]()
    for now, prompt in enumerate(prompts):
        pick = picker.pick(ask(prompt), now=now)
        picker.on_response_headers(pick, status=200, served=pick.destinations[0], now=now)
        picker.end(pick, outcome="ended", now=now)
        line = line_of(pick, unix_now_s=1000.0 + now, key=b"k")
        lines.append(structs.replace(line, prompt_tokens=round(len(prompt) / bytes_per_token)))
    write(tmp_path / "r.jsonl", picker, [*lines])
    trace = read([tmp_path / "r.jsonl"])
    assert trace.bytes_per_token == pytest.approx(bytes_per_token, rel=0.01)
    replaying, events = a_picker(on=endpoints("a")), list[PickerEvent]()
    replaying.subscribe(events.append)
    router = PickerRouter([replaying], adapters=frozenset(), bytes_per_token=trace.bytes_per_token)
    router.set_servers("a", restarted="", now=0.0)
    for state in replaying.fleet.states():
        state.account.doubted = False  # a first answer that is read teaches the size of tokens
    for at_s, request in trace.calls:
        router.route(request, now=at_s)
        router.ended(request.request_id, failed=False, cached_tokens=0, now=at_s)
    matched = [event.pick.decision.matched_tokens for event in events if isinstance(event, Ended)]
    assert matched == [line.matched_tokens for line in lines] == [0, shared * 256 // 4]


@pytest.mark.slow
def test_a_replay_gives_the_hits_and_the_ratio_of_two_rules(tmp_path: Path) -> None:
    """The simulated servers are slower than the recorded ones: the picker learned their rate while they were
    busy. So times are compared with each other, not with the clock.
    """
    path = tmp_path / "recording.jsonl"
    other = record_simulation(path, requests=300, rule="round-robin")
    was = record_simulation(path, requests=300)
    trace = read([path])
    assert trace.policy is not None
    tried = structs.replace(trace.policy, spec=structs.replace(trace.policy.spec, rule="round-robin"))
    found, changed = (run(trace, policy) for policy in (trace.policy, tried))
    assert found.hit_ratio == pytest.approx(was.hit_ratio, abs=0.01)
    assert changed.hit_ratio == pytest.approx(other.hit_ratio, abs=0.03)
    assert found.ttft_mean_s is not None
    assert changed.ttft_mean_s is not None
    assert 1.0 < found.ttft_mean_s / was.ttft_mean_s < 1.6
    assert found.ttft_mean_s / changed.ttft_mean_s == pytest.approx(
        was.ttft_mean_s / other.ttft_mean_s, rel=0.15
    )


def test_more_load_means_longer_waits_and_more_servers_shorter_waits(tmp_path: Path) -> None:
    trace = a_trace(tmp_path)
    slow = replace(trace, servers=[replace(s, prefill_tokens_per_s=400.0) for s in trace.servers])
    usual = run(slow, DEFAULT_POLICY)
    busy = run(slow.changed(load=4.0, servers=0), DEFAULT_POLICY)
    relieved = run(slow.changed(load=4.0, servers=12), DEFAULT_POLICY)
    assert usual.ttft_mean_s is not None
    assert busy.ttft_mean_s is not None
    assert relieved.ttft_mean_s is not None
    assert busy.ttft_mean_s > 1.5 * usual.ttft_mean_s
    assert relieved.ttft_mean_s < busy.ttft_mean_s
    assert len(relieved.by_server) == 12


def a_call(at_s: float = 0.0, *, name: int = 1, tokens: int = 64) -> tuple[float, SimRequest]:
    number = int(at_s)
    return at_s, SimRequest(
        request_id=number, segments=(Segment(name, tokens),), answer=Segment(2**63 + number, 2)
    )


def test_the_fleet_is_as_recorded_or_repeats_the_recorded_servers() -> None:
    servers = [
        RecordedServer(name=name, capacity_tokens=n, prefill_tokens_per_s=1.0)
        for n, name in enumerate("ab", 1)
    ]
    trace = Trace(calls=[a_call()], servers=servers)
    assert trace.changed(load=1.0, servers=0) == trace
    assert [s.name for s in trace.changed(load=1.0, servers=1).servers] == ["a"]
    more = trace.changed(load=1.0, servers=5).servers
    assert [s.name for s in more] == ["a", "b", "a+1", "b+1", "a+2"]
    assert [s.capacity_tokens for s in more] == [1, 2, 1, 2, 1]


def test_the_fleet_has_equal_servers_if_no_server_is_recorded(tmp_path: Path) -> None:
    path = recording_file(tmp_path)
    opening, _, *asked = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([opening, *asked]))
    trace = read([path])
    assert [s.name for s in trace.servers] == [f"server-{n}" for n in range(8)]
    assert len({(s.capacity_tokens, s.prefill_tokens_per_s) for s in trace.servers}) == 1
    assert "the simulated servers are made up" in trace.remarks[-1]
    assert len(trace.changed(load=1.0, servers=3).servers) == 3


def test_equal_pieces_are_found_in_the_cache_and_others_are_not() -> None:
    calls = [a_call(10.0 * n, name=1 if n % 2 else 100 + n, tokens=640) for n in range(40)]
    trace = Trace(
        calls=calls, servers=[RecordedServer(name="a", capacity_tokens=10**6, prefill_tokens_per_s=8000.0)]
    )
    found = run(trace, DEFAULT_POLICY)
    assert found.counted == 36
    assert found.hit_ratio == pytest.approx(0.5, abs=0.06)
    assert found.by_server == {"a": 40}


def test_a_faster_server_gets_its_answers_sooner() -> None:
    def mean_s(tokens_per_s: float) -> float:
        server = RecordedServer(name="a", capacity_tokens=10**6, prefill_tokens_per_s=tokens_per_s)
        calls = [a_call(10.0 * n, name=n, tokens=6400) for n in range(20)]
        found = run(Trace(calls=calls, servers=[server]), DEFAULT_POLICY)
        assert found.ttft_mean_s is not None
        return found.ttft_mean_s

    assert mean_s(16_000.0) < 0.7 * mean_s(8000.0)


def test_a_recording_gives_times_sizes_and_equal_pieces(tmp_path: Path) -> None:
    trace = a_trace(tmp_path)
    assert len(trace.calls) == 120
    assert [at_s for at_s, _ in trace.calls] == pytest.approx([n * 0.5 for n in range(120)])
    assert trace.policy is not None
    assert trace.policy.spec.rule == "least-cost"
    assert [server.name for server in trace.servers] == list("abcd")
    requests = [request for _, request in trace.calls]
    starts = {request.segments[:20] for request in requests}
    assert len(starts) == 4, "four shared beginnings"
    for request in requests:
        text_bytes = request.num_prompt_tokens * trace.bytes_per_token
        assert abs((text_bytes - 6000 + 350) % 700 - 350) < 8, "as long as the recorded prompt"
    assert len({request.segments[-1] for request in requests}) == 120, (
        "the text after the last full chunk belongs to one request alone"
    )


def test_the_length_of_an_unsampled_answer_is_derived_from_its_time(tmp_path: Path) -> None:
    trace = a_trace(tmp_path)
    assert {request.answer.num_tokens for _, request in trace.calls} == {49, 50}, (
        "as many tokens as fit at the pace of the sampled answers"
    )
    assert any("12 of 120 answers have a recorded length" in remark for remark in trace.remarks)
    assert trace.recorded is not None
    assert trace.recorded.ttft_p50_s == pytest.approx(0.2)
    assert sum(trace.recorded.by_server.values()) == 120


def test_several_files_in_any_order_are_one_trace(tmp_path: Path) -> None:
    whole, old, new = (tmp_path / name for name in ("whole", "old", "new"))
    record(whole)
    opening, servers, *asked = whole.read_bytes().splitlines(keepends=True)
    old.write_bytes(b"".join([opening, servers, *asked[:60]]))
    new.write_bytes(b"".join([opening, servers, *asked[60:]]))
    assert read([new, old]).calls == read([whole]).calls


def test_a_last_line_that_was_cut_off_is_ignored(tmp_path: Path) -> None:
    path = recording_file(tmp_path)
    path.write_bytes(path.read_bytes()[:-20])
    assert len(read([path]).calls) == 119


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "no request"),
        ("nonsense\nmore\n", "line 1: JSON is malformed: .*; name files of `epp record`"),
        ("[" * 100_000 + "\n", "line 1: "),
        ('{"line":"recording","policy":' + "[" * 100_000 + "\n", "line 1: "),
        (json_lines({"line": "request"}), "line 1: Object missing required field"),
        (json_lines({"line": "recording", "version": 9, "chunk_bytes": 1, "later_chunk_bytes": 1, "later_from_bytes": 0, "hashing": "", "policy": {}}, {}), "line 1: the recording has version 9"),
    ],
)  # fmt: skip
def test_a_file_that_is_not_a_recording_is_refused_with_its_line(
    tmp_path: Path, text: str, fault: str
) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=fault):
        read([path])


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"prompt_bytes": 2**40}, "prompt_bytes"),
        ({"prompt_bytes": 1}, "more chunks than a prompt of 1 bytes has"),
        ({"at_unix_s": 1e300}, "at_unix_s"),
        ({"ended_s": -1.0}, "ended_s"),
        ({"output_tokens": 2**40}, "output_tokens"),
        ({"at_unix_s": 1e9}, "days apart"),
    ],
)
def test_an_impossible_request_is_refused_by_its_field(
    tmp_path: Path, wrong: dict[str, object], why: str
) -> None:
    """Simulated servers would carry out all of it: hours or gigabytes for a line of 300 bytes."""
    path = tmp_path / "r.jsonl"
    record(path, requests=20)
    rows = [json.loads(row) for row in path.read_text().splitlines()]
    rows[-3] |= wrong
    path.write_text(json_lines(*rows))
    with pytest.raises(ConfigError, match=why):
        read([path])


def test_absurd_answers_and_caches_are_reduced(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    record(path, requests=20)
    rows = [json.loads(row) for row in path.read_text().splitlines()]
    rows[-1]["output_tokens"] = 2**29
    for row in rows:
        for server in row.get("servers", ()):
            server["capacity_tokens"] = 2**35
    path.write_text(json_lines(*rows))
    trace = read([path])
    assert max(request.answer.num_tokens for _, request in trace.calls) == 2**18
    assert {server.capacity_tokens for server in trace.servers} == {2**26}


def test_the_command_prints_the_policies_side_by_side(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = tmp_path / "tried.yaml"
    policy.write_text(
        "apiVersion: prefix-gateway.dev/v1alpha1\nkind: PrefixRoutingPolicy\nmetadata: {name: tried}\nspec: {rule: random}\n"
    )
    file = tmp_path / "page.json"
    options = ["--policy", str(policy), "--rule", "round-robin", "--json", str(file)]
    assert cli.main(["replay", str(recording_file(tmp_path)), *options]) == 0
    heads = ["as recorded", "recorded (least-cost)", "tried (random)", "round-robin"]
    shown = capsys.readouterr().out
    assert all(head in shown for head in heads)
    columns = json.loads(file.read_text())
    assert list(columns) == heads
    assert columns["recorded (least-cost)"]["hit_ratio"] > columns["round-robin"]["hit_ratio"]


def test_the_table_for_another_load_has_no_column_of_recorded_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["replay", str(recording_file(tmp_path)), "--load", "1.3"]) == 0
    shown = capsys.readouterr().out
    assert "at 1.3 times the recorded rate" in shown
    assert "as recorded" not in shown


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        (["no-such-file"], "no-such-file: No such file"),
        (["{recording}", "--policy", "no-such-policy"], "no-such-policy: No such file"),
    ],
)
def test_the_error_names_an_unusable_argument(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], fault: str
) -> None:
    given = [option.format(recording=recording_file(tmp_path)) for option in options]
    assert cli.main(["replay", *given]) == 2
    assert fault in capsys.readouterr().err
