"""The data of the live page."""

import gzip
import json
from dataclasses import replace
from typing import Any

import pytest

from epp.base.types import EndpointName
from epp.observe.telemetry.board import Board
from epp.observe.telemetry.decisions import DecisionRing, RefusalRecord
from epp.observe.telemetry.picker_state import EndpointStatus, PickerStatus
from epp.picker.flow.accounts import FlowStatus, WaitingTenant
from tests.harness.clock import Clock
from tests.unit.observe.telemetry.records import HERE, SHARING, decision


def status_of_endpoint(name: str = "a", **more: Any) -> EndpointStatus:
    unknown = {"waiting": None, "kv_usage": None}
    return EndpointStatus(name=EndpointName(name), address=HERE.text, **unknown | more)


class BoardPage:
    def __init__(self, *endpoints: EndpointStatus, **more: Any) -> None:
        self.clock = Clock(100.0)
        self.ring = DecisionRing(maxlen=100)
        self.status = PickerStatus(endpoints=endpoints)
        self.asked = 0
        parts: dict[str, Any] = {
            "explain": lambda _: {"requests": 0},
            "dry_run": lambda: None,
            "unix_clock": lambda: 9_000.0,
        }
        self.board = Board(state=self._state, decisions=self.ring, clock=self.clock, **(parts | more))

    def _state(self) -> PickerStatus:
        self.asked += 1
        return self.status

    def row(self) -> dict[str, Any]:
        (row,) = self.board.own()["endpoints"]
        found: dict[str, Any] = row
        return found


def test_a_row_has_the_load_from_all_pickers() -> None:
    page = BoardPage(
        status_of_endpoint(
            in_flight=2,
            peers_in_flight=3,
            running=1,
            waiting=1,
            backlog_tokens=4000.0,
            prefill_tokens_per_s=8000.0,
            kv_usage=0.12345,
            table_bytes=50,
            table_capacity_bytes=100,
        )
    )
    row = page.row()
    assert (row["name"], row["state"], row["why"], row["load"], row["waiting"]) == ("a", "ready", "", 5, 1)
    assert (row["backlog_s"], row["kv"], row["mirror"]) == (0.5, 0.123, 0.5)
    assert (row["predicted"], row["actual"]) == (None, None), "nothing was asked since the page began"


def test_unknown_numbers_of_an_endpoint_are_none_and_its_backlog_is_0() -> None:
    row = BoardPage(status_of_endpoint(ready=False, ejected="half of its answers failed")).row()
    assert (row["state"], row["why"]) == ("out", "half of its answers failed")
    assert (row["waiting"], row["kv"], row["mirror"], row["backlog_s"]) == (None, None, None, 0.0)


def test_hit_rates_are_those_of_the_last_samples() -> None:
    first = status_of_endpoint(prefix_queries_tokens=1000.0, prefix_hits_tokens=900.0, predicted_tokens=900)
    page = BoardPage(first)
    page.board.sample()
    page.status = PickerStatus(
        endpoints=(
            replace(
                first,
                prefix_queries_tokens=2000.0,
                prefix_hits_tokens=1150.0,
                predicted_tokens=1400,
                backlog_tokens=800.0,
                prefill_tokens_per_s=1000.0,
            ),
        )
    )
    page.board.sample()
    row = page.row()
    assert (row["predicted"], row["actual"], row["spark"]) == (0.5, 0.25, [0.0, 0.8])


def test_counters_of_server_that_started_again_give_no_rate_out_of_bounds() -> None:
    first = status_of_endpoint(prefix_queries_tokens=100.0, prefix_hits_tokens=90.0, predicted_tokens=0)
    page = BoardPage(first)
    page.board.sample()
    page.status = PickerStatus(
        endpoints=(replace(first, prefix_queries_tokens=150.0, prefix_hits_tokens=5.0, predicted_tokens=400),)
    )
    row = page.row()
    assert (row["predicted"], row["actual"]) == (1.0, 0.0)


@pytest.mark.parametrize(("count", "seconds"), [(100, 2.0), (101, 10.0)])
def test_the_page_is_made_once_for_all_requests_within_some_seconds(count: int, seconds: float) -> None:
    page = BoardPage(*(status_of_endpoint(f"s{n}") for n in range(count)))
    first = page.board.packed()
    page.clock.now += seconds - 0.1
    assert page.board.packed() is first
    page.clock.now += 0.1
    assert page.board.packed() is not first
    assert page.asked == 2
    assert json.loads(gzip.decompress(first)) == json.loads(json.dumps(page.board.own()))


def test_requests_and_waiting_tenants_are_shown_in_bounded_text() -> None:
    page = BoardPage(status_of_endpoint())
    page.ring.append(decision("r1", model="m" * 600))
    page.ring.append(
        RefusalRecord(request_id="r2", at_unix_s=5.0, status=503, reason="no_endpoint", message="m")
    )
    waiting = [WaitingTenant(tenant="t" * 600, priority=1, requests=2, tokens=300)] * 20
    flow = FlowStatus(model="m", oldest_s=1.25, requests={1: 40}, tokens={1: 6000}, tenants=waiting)
    page.status = replace(page.status, flow=[flow])
    own = page.board.own()
    refused, routed = own["requests"]
    assert (refused["request_id"], refused["status"], "model" in refused) == ("r2", 503, False)
    assert (routed["request_id"], len(routed["model"]), routed["matched_tokens"]) == ("r1", 512, 600)
    assert "candidates" not in routed, "a click asks for them"
    (queue,) = own["queue"]
    tenants = queue["tenants"]
    assert (queue["priorities"], len(tenants), len(tenants[0].tenant)) == ({"1": 40}, 10, 80)


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (PickerStatus(endpoints=()), "There are no endpoints"),
        (PickerStatus(endpoints=(status_of_endpoint(ready=False),)), "No endpoint is ready"),
        (
            PickerStatus(endpoints=(status_of_endpoint(scrape_error="refused", scrape_age_s=9),)),
            "No model server answers (refused)",
        ),
        (PickerStatus(endpoints=(status_of_endpoint(),), overload_ratio=0.25), "passes 25 % of the requests"),
        (PickerStatus(endpoints=(status_of_endpoint(),), draining=True), "The picker is ending"),
        (
            PickerStatus(endpoints=(status_of_endpoint(),), sharing=replace(SHARING, connected=False)),
            "Other pickers cannot be reached",
        ),
        (PickerStatus(endpoints=(status_of_endpoint(),)), "p.yaml: line 4"),
    ],
)
def test_the_page_says_what_is_wrong_now(status: PickerStatus, message: str) -> None:
    page = BoardPage(problems=lambda: ["refused: p.yaml: line 4"])
    page.status = status
    assert any(message in problem for problem in page.board.own()["problems"])


def test_the_figures_are_those_of_the_last_minute() -> None:
    page = BoardPage(status_of_endpoint(table_bytes=101, table_capacity_bytes=100))
    for n in range(5):
        made = decision(f"r{n}")
        made.at_unix_s, made.ttft_s, made.status = (
            9_000.0 + 900 * (n - 3),
            float(n),
            500 if n == 4 else 200,
        )
        page.ring.append(made)
    recent = page.board.own()["recent"]
    assert (recent["per_s"], recent["errors"]) == (2 / 60, 1)
    assert (recent["ttft_p50_s"], recent["ttft_p90_s"]) == (4.0, 4.0)
    assert page.row()["mirror"] == 1.0
