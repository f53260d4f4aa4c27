"""A request that names what one server keeps goes to that server."""

import dataclasses
from collections.abc import Mapping

import pytest
from msgspec.structs import replace

from epp.base.types import ApiKind, EndpointMetrics, EndpointName, InferenceRequest
from epp.config.policy import Chunks, FailureSettings, PolicySpec, RuleName, Sampling
from epp.picker import remembered
from epp.picker.decision import Question
from epp.picker.endpoints.marks import Form, Verdict
from epp.picker.picker import Picker
from tests.invariants.picker import check_kept_state
from tests.unit.picker.picker_questions import a_picker, ask, endpoints, policy_of, serve, state, text


def naming(name: str) -> Question:
    return replace(ask(text(name, 2000), kind=ApiKind.RESPONSES), names_state=name)


def make(picker: Picker, name: str, *, now: float) -> EndpointName:
    """Let some server make a response with this id. Return the server."""
    pick = serve(picker, replace(ask(text(name), kind=ApiKind.RESPONSES), makes_state=True), now=now)
    assert pick.sampled, "its answer has to be read"
    picker.on_made(pick, name, now=now)
    check_kept_state(picker.kept_state)
    return pick.decision.chosen


def picks(picker: Picker, names: Mapping[str, EndpointName], *, now: float) -> dict[str, tuple[str, bool]]:
    """Return for each id the reason, and whether its own server was chosen."""
    found = {}
    for name, server in names.items():
        decision = serve(picker, naming(name), now=now).decision
        found[name] = (decision.reason, decision.chosen == server)
    return found


@pytest.mark.parametrize("share", [0.0, 0.01])
@pytest.mark.parametrize("rule", ["least-cost", "affinity", "round-robin"])
def test_each_follow_up_goes_to_the_server_of_its_response(rule: RuleName, share: float) -> None:
    picker = a_picker(PolicySpec(rule=rule, sampling=Sampling(share=share)))
    made = {f"resp_{n}": make(picker, f"resp_{n}", now=1.0 + n) for n in range(24)}
    assert len(set(made.values())) > 1
    assert picks(picker, made, now=100.0) == dict.fromkeys(made, ("state", True))


def test_another_policy_forgets_no_response() -> None:
    picker = a_picker()
    made = {"resp_1": make(picker, "resp_1", now=1.0)}
    picker.set_policy(policy_of(PolicySpec(chunks=Chunks(size_bytes=128))))
    assert picks(picker, made, now=3.0) == {"resp_1": ("state", True)}


def test_what_a_server_kept_is_gone_after_its_restart() -> None:
    picker = a_picker()
    made = {"resp_1": make(picker, "resp_1", now=1.0)}
    server = made["resp_1"]
    picker.news.observe(server, EndpointMetrics(scraped_at=2.0, prompt_tokens=500.0), now=2.0)
    picker.news.observe(server, EndpointMetrics(scraped_at=3.0, prompt_tokens=1.0), now=3.0)
    assert picks(picker, made, now=4.0)["resp_1"][0] == "no_state"


@pytest.mark.parametrize(("comes_back", "reason"), [("1", "state"), ("2", "no_state")])
def test_what_a_pod_kept_is_gone_if_another_pod_gets_its_name(comes_back: str, reason: str) -> None:
    fleet = [dataclasses.replace(each, incarnation="1") for each in endpoints("abcd")]
    picker = a_picker(on=fleet)
    made = {"resp_1": make(picker, "resp_1", now=1.0)}
    left = [each for each in fleet if each.name != made["resp_1"]]
    (pod,) = set(fleet) - set(left)
    picker.news.set_endpoints(left, now=2.0)
    picker.news.set_endpoints([*left, dataclasses.replace(pod, incarnation=comes_back)], now=200.0)
    assert picks(picker, made, now=201.0)["resp_1"][0] == reason


def test_a_follow_up_goes_to_its_server_although_it_fails() -> None:
    """No other server could answer it with anything but 404."""
    picker = a_picker()
    made = {"resp_1": make(picker, "resp_1", now=1.0)}
    server = made["resp_1"]
    for n in range(10):
        picker.fleet.failures.failed(state(picker, server), Form.FAILS, now=2.0 + n / 10)
    assert picker.news.ejected(now=4.0)
    assert picks(picker, made, now=4.0) == {"resp_1": ("state", True)}
    picker.news.set_endpoints([e for e in endpoints("abcd") if e.name != server], now=5.0)
    assert picks(picker, made, now=6.0)["resp_1"][0] == "no_state"


@pytest.mark.parametrize("form", [Form.HANGS, Form.STALLS])
@pytest.mark.parametrize("verdict", ["ill", "unclear", "well"])
def test_a_server_that_hangs_gets_follow_ups_only_if_a_probe_is_well(form: Form, verdict: Verdict) -> None:
    """A probe of a server with a queue is unclear, and so is one that is refused or finds no connection."""
    picker = a_picker()
    made = {"resp_1": make(picker, "resp_1", now=1.0)}
    failures = picker.fleet.failures
    failures.convict(state(picker, made["resp_1"]), form, now=2.0)
    assert picks(picker, made, now=2.1) == {"resp_1": ("state", True)}
    (probe,) = failures.probes_due(now=2.2)
    failures.probed(probe, verdict, now=2.3)
    goes = ("state", True) if verdict == "well" else ("no_state", False)
    assert picks(picker, made, now=2.4) == {"resp_1": goes}


@pytest.mark.parametrize("rank", [None, 0])
def test_a_server_that_hangs_and_cannot_be_probed_gets_no_follow_up(rank: int | None) -> None:
    spec = PolicySpec(failures=FailureSettings(probe=rank is not None))
    picker = a_picker(spec, on=[dataclasses.replace(each, rank=rank) for each in endpoints("abcd")])
    made = {"resp_1": make(picker, "resp_1", now=1.0)}
    picker.fleet.failures.convict(state(picker, made["resp_1"]), now=2.0)
    assert not picker.fleet.failures.probes_due(now=2.0)
    assert picks(picker, made, now=2.1) == {"resp_1": ("no_state", False)}


def test_a_follow_up_finds_its_server_without_time_to_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pick stays as cheap as any other without time, whether the id is known or made up."""
    picker = a_picker()
    made = {f"resp_{n}": make(picker, f"resp_{n}", now=1.0 + n) for n in range(8)}
    unread = InferenceRequest(kind=ApiKind.RESPONSES, unread="overload")
    monkeypatch.setattr(picker, "consider", None)
    for name in (*made, "made-up"):
        named = Question(request_id=name, inference=unread, names_state=name, overload=True)
        decision = serve(picker, named, now=20.0).decision
        assert (decision.reason, decision.unread) == ("overload", "overload")
        assert decision.chosen == made.get(name, decision.chosen)
        assert len(set(decision.destinations)) == 3


def test_ids_are_forgotten_after_a_day_and_when_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remembered, "_MOST_STATES", 100)
    picker = a_picker()
    made = {f"resp_{n}": make(picker, f"resp_{n}", now=1.0) for n in range(101)}
    check_kept_state(picker.kept_state)
    reasons = picks(picker, {name: made[name] for name in ("resp_0", "resp_1")}, now=2.0)
    assert [reason for reason, _ in reasons.values()] == ["no_state", "state"]
    assert picks(picker, made, now=90_000.0)["resp_1"][0] == "no_state"
