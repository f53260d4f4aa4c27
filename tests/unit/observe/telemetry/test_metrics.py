"""The values that Prometheus gets of events and of state."""

import logging
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from epp.base.errors import BadRequestError, NoEndpointError
from epp.base.types import EndpointName
from epp.observe.telemetry.decisions import DecisionRing, RefusalRecord
from epp.observe.telemetry.metrics import Metrics
from epp.observe.telemetry.picker_state import (
    EndpointStatus,
    PickerStatus,
)
from epp.picker.decision import Prefill
from epp.picker.events import ProtocolFault, Proved, Refused
from epp.picker.flow.accounts import FlowStatus
from epp.picker.prefix_index.reported import ExactModelStatus, ExactServerStatus, ExactStatus
from tests.reference.pages import METRICS
from tests.unit.observe.telemetry.records import HERE, SHARING, answered, began, decision, ended, pick

EXACT = ExactStatus(
    models={"m": ExactModelStatus(state="on", reason="", prompts={"mapped": 9, "content": 1})},
    servers={EndpointName("a"): ExactServerStatus(state="partly", reason="", blocks=70, events=300)},
    dropped_prompts=2,
    gaps={"found": 3, "lost": 1},
    malformed=0,
    corrections={"credited": 4, "forgotten": 5},
)


class Shown:
    """Metrics over a state that the test sets, and their values as Prometheus would read them."""

    def __init__(self) -> None:
        unstated: Any = dict.fromkeys(("waiting", "kv_usage", "capacity_tokens", "scrape_age_s"))
        self.status = PickerStatus(
            endpoints=(EndpointStatus(name=EndpointName("a"), address=HERE.text, **unstated),),
            sharing=SHARING,
            exact=EXACT,
        )
        self.ring = DecisionRing(maxlen=10)
        self.metrics = Metrics(
            decisions=self.ring, state=lambda: self.status, unix_clock=lambda: 5.0, timer=lambda: 1.0002
        )

    def samples(self, name: str) -> dict[tuple[str, ...], float]:
        """Return the values by their labels, in the order of the labels' names."""
        families = text_string_to_metric_families(b"".join(self.metrics.pieces()).decode())
        return {
            tuple(v for _, v in sorted(s.labels.items())): s.value
            for f in families
            for s in f.samples
            if s.name == name
        }

    def value(self, name: str, *labels: str) -> float:
        return self.samples(name)[labels]


@pytest.fixture
def shown() -> Shown:
    return Shown()


def test_a_request_is_counted_from_its_pick_to_its_end(shown: Shown) -> None:
    made = pick()
    shown.metrics.on_event(began(made, began_s=1.0))
    assert shown.value("epp_in_flight") == 1
    assert shown.samples("epp_requests_total") == {}
    assert shown.value("epp_prompt_tokens_total") == 0
    shown.metrics.on_event(Proved(0.0, made, None))
    shown.metrics.on_event(answered(made))
    made.decision.outcome = "aborted"
    shown.metrics.on_event(ended(made))
    assert shown.value("epp_in_flight") == 0
    assert shown.samples("epp_requests_total") == {("chat", "aborted"): 1}
    assert (shown.value("epp_prompt_tokens_total"), shown.value("epp_matched_tokens_total")) == (1000, 600)
    assert shown.value("epp_pick_seconds_sum") == pytest.approx(0.0002)
    assert shown.value("epp_served_mismatch_total") == 0
    assert shown.samples("epp_picks_total") == {("a", "prefix"): 1}
    assert shown.ring.get("r1") is made.decision


def test_requests_whose_body_was_not_read_are_counted_by_the_reason(shown: Shown) -> None:
    for reason in ("", "costly_body", "costly_body"):
        made = pick()
        made.decision.unread = reason
        shown.metrics.on_event(began(made))
    assert shown.samples("epp_unread_bodies_total") == {("costly_body",): 2}


def test_short_times_fall_into_fine_buckets(shown: Shown) -> None:
    shown.metrics.on_event(began(pick(), began_s=1.00017))
    buckets = shown.samples("epp_pick_seconds_bucket")
    assert buckets["1e-05",] == buckets["2e-05",] == 0
    assert buckets["5e-05",] == 1


def test_a_refusal_is_counted_by_reason_and_can_be_asked_about(shown: Shown) -> None:
    shown.metrics.on_event(Refused("r7", BadRequestError("messages: expected a list", reason="bad_messages")))
    shown.metrics.on_event(Refused("r8", NoEndpointError("none", reason="no_endpoints")))
    shown.metrics.on_event(Refused("r9", NoEndpointError("none", reason="no_endpoints")))
    assert shown.samples("epp_refused_total") == {("bad_messages",): 1, ("no_endpoints",): 2}
    assert shown.samples("epp_requests_total") == {("unknown", "refused"): 3}
    assert shown.ring.get("r7") == RefusalRecord(
        request_id="r7", at_unix_s=5.0, status=400, reason="bad_messages", message="messages: expected a list"
    )


def test_mismatches_and_protocol_errors_are_counted(shown: Shown) -> None:
    shown.metrics.on_event(answered(pick(), mismatch=True))
    shown.metrics.on_event(ProtocolFault("body_before_headers"))
    assert shown.value("epp_served_mismatch_total") == 1
    assert shown.samples("epp_protocol_errors_total") == {("body_before_headers",): 1}


def test_answers_are_counted_by_server_and_status_until_it_leaves(shown: Shown) -> None:
    for status, headers_s in ((200, 0.5), (204, 0.25), (503, 0.1), (429, 0.1), (404, 0.1), (400, 0.1)):
        done = pick(decision(chosen="b"))
        done.decision.served_by, done.decision.status = EndpointName("a"), status
        done.decision.headers_s = headers_s
        shown.metrics.on_event(answered(done, mismatch=True))
    assert shown.samples("epp_answers_total") == {
        ("2xx", "a"): 2.0,
        ("5xx", "a"): 1.0,
        ("429", "a"): 1.0,
        ("404", "a"): 1.0,
        ("4xx", "a"): 1.0,
    }
    assert shown.samples("epp_time_to_headers_seconds_total") == {("a",): pytest.approx(1.15)}
    shown.status = PickerStatus()
    assert shown.samples("epp_answers_total") == {}


def test_only_answers_with_reported_hits_are_compared_with_the_prediction(shown: Shown) -> None:
    reported, silent = pick(), pick(decision("r2"))
    reported.decision.cached_tokens, reported.decision.ttft_s, reported.decision.predicted_s = 580, 0.3, 0.25
    for made in (reported, silent):
        shown.metrics.on_event(began(made))
        shown.metrics.on_event(ended(made))
    assert shown.value("epp_sampled_predicted_tokens_total") == 600
    assert shown.value("epp_sampled_cached_tokens_total") == 580
    assert shown.value("epp_sampled_ttft_seconds_count") == 1
    assert shown.value("epp_sampled_predicted_seconds_total") == 0.25


def test_the_state_is_read_when_the_page_is_requested(shown: Shown) -> None:
    status = EndpointStatus(
        name=EndpointName("a"),
        address=HERE.text,
        ready=False,
        failure_share=0.75,
        is_ejected=True,
        in_flight=3,
        backlog_tokens=1234.5,
        capacity_tokens=200_000,
        table_evictions=2,
        scrape_age_s=1.5,
        scrape_error="HTTP status 500",
    )
    shown.status = PickerStatus(
        endpoints=(status,), policy_info={("p", "affinity"): 1}, draining=True, without_model_list=3
    )
    assert shown.samples("epp_endpoint_ready") == {("a",): 0}
    assert shown.samples("epp_endpoint_ejected") == {("a",): 1}
    assert shown.samples("epp_endpoint_failure_share") == {("a",): 0.75}
    assert shown.samples("epp_endpoint_in_flight") == {("a",): 3}
    assert shown.samples("epp_endpoint_backlog_tokens") == {("a",): 1234.5}
    assert shown.samples("epp_endpoint_scrape_age_seconds") == {("a",): 1.5}
    assert shown.samples("epp_endpoint_scrape_ok") == {("a",): 0}
    assert shown.samples("epp_table_evictions_total") == {("a",): 2}
    assert shown.samples("epp_policy_info") == {("p", "affinity"): 1}
    assert shown.value("epp_draining") == 1
    assert shown.value("epp_endpoints_without_model_list") == 3


def test_numbers_that_a_server_does_not_report_are_absent_and_not_zero(shown: Shown) -> None:
    for name in ("waiting", "kv_usage_ratio", "capacity_tokens", "scrape_age_seconds"):
        assert shown.samples(f"epp_endpoint_{name}") == {}


def test_the_series_of_an_endpoint_are_removed_with_the_endpoint(shown: Shown) -> None:
    shown.metrics.on_event(began(pick(decision(chosen="a"))))
    shown.metrics.on_event(began(pick(decision(chosen="b"))))
    a, b = (EndpointStatus(name=EndpointName(name), address=HERE.text) for name in "ab")
    shown.status = replace(shown.status, endpoints=(a, b))
    assert shown.samples("epp_picks_total") == {("a", "prefix"): 1, ("b", "prefix"): 1}
    shown.status = replace(shown.status, endpoints=(b,))
    assert shown.samples("epp_picks_total") == {("b", "prefix"): 1}
    assert shown.samples("epp_endpoint_ready") == {("b",): 1}
    shown.status = replace(shown.status, endpoints=(a, b))
    assert shown.samples("epp_picks_total") == {("b", "prefix"): 1}


def test_label_values_from_outside_cannot_forge_a_line(shown: Shown) -> None:
    shown.status = PickerStatus(policy_info={('p"\nepp_in_flight 99\n', "r\\"): 1})
    assert shown.samples("epp_policy_info") == {('p"\nepp_in_flight 99\n', "r\\"): 1}
    assert shown.value("epp_in_flight") == 0


def test_skipped_events_are_shown_by_reason_and_absent_without_sharing(shown: Shown) -> None:
    assert shown.value("epp_sharing_peers") == 3
    assert shown.samples("epp_sharing_skipped_events_total") == {("stale",): 2}
    shown.status = PickerStatus()
    assert shown.samples("epp_sharing_peers") == {}


def test_the_numbers_of_exact_mode_are_shown_and_absent_if_it_is_off(shown: Shown) -> None:
    assert shown.samples("epp_exact_model") == {("m", "on"): 1}
    assert shown.samples("epp_exact_prompts_total") == {("m", "mapped"): 9, ("m", "content"): 1}
    assert shown.samples("epp_exact_endpoint") == {("a", "partly"): 1}
    assert shown.samples("epp_exact_gaps_total") == {("found",): 3, ("lost",): 1}
    assert shown.samples("epp_exact_corrections_total") == {("credited",): 4, ("forgotten",): 5}
    shown.status = PickerStatus()
    assert shown.samples("epp_exact_model") == {}


def test_every_declared_metric_is_served(shown: Shown) -> None:
    shown.metrics.on_event(began(pick()))
    fast = EndpointStatus(name=EndpointName("a"), address=HERE.text, prefill_tokens_per_s=9000.0)
    flow = FlowStatus(model="m", oldest_s=0.0, requests={}, tokens={})
    shown.status = replace(shown.status, endpoints=(fast,), flow=(flow,))
    specs = {spec.name: spec for spec in METRICS}
    served = {
        family.name + ("_total" if family.type == "counter" else ""): family
        for family in shown.metrics.collect()
        if family.name.startswith("epp_")
    }
    assert served.keys() == specs.keys()
    for name, spec in specs.items():
        assert served[name].type == spec.kind
        assert served[name].documentation == spec.help


def test_a_refusal_is_logged_with_its_request_id(shown: Shown, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    shown.metrics.on_event(Refused("r-1", BadRequestError("not JSON", reason="bad_json")))
    shown.metrics.on_event(Refused("r-2", NoEndpointError("no server", reason="no_ready_endpoint")))
    logged = [(r.levelname, vars(r)["request_id"], vars(r)["status"]) for r in caplog.records]
    assert logged == [("INFO", "r-1", 400), ("WARNING", "r-2", 503)]


def test_prompts_computed_elsewhere_are_counted_by_prefill_endpoint(shown: Shown) -> None:
    made = decision()
    made.prefill = Prefill(
        name=EndpointName("a"),
        address="10.0.0.9:8000",
        matched_tokens=100,
        uncached_tokens=900,
        transfer_s=0.02,
        predicted_s=0.3,
        cost_s=0.3,
        instead_of_s=0.5,
    )
    shown.metrics.on_event(began(pick(made)))
    shown.metrics.on_event(began(pick(decision())))
    assert shown.value("epp_prefill_picks_total", "a") == 1
    assert shown.value("epp_prefill_tokens_total", "a") == 900
