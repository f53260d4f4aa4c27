"""The data of the live page: one picker's own part, and the sum of several pickers' parts."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from typing import Any

import pytest

from epp.base.types import EndpointName
from epp.observe.telemetry.board import COLUMNS, Board, merged, part_of
from epp.observe.telemetry.decisions import DecisionRing, Refusal
from epp.observe.telemetry.picker_state import EndpointStatus, PickerStatus
from epp.picker.flow.status import FlowStatus, WaitingTenant
from tests.harness.clock import Clock
from tests.unit.observe.telemetry.records import HERE, decision


def status_of_endpoint(name: str = "a", **more: Any) -> EndpointStatus:
    return EndpointStatus(name=EndpointName(name), address=HERE, **more)


class BoardPage:
    def __init__(self, *endpoints: EndpointStatus, **more: Any) -> None:
        self.clock = Clock(100.0)
        self.ring = DecisionRing(maxlen=100)
        self.status = PickerStatus(endpoints=endpoints)
        self.asked = 0
        parts: dict[str, Any] = {
            "explain": lambda _: {"requests": 0},
            "prefixes": list,
            "dry_run": lambda: None,
        }
        self.board = Board(state=self._state, decisions=self.ring, clock=self.clock, **(parts | more))

    def _state(self) -> PickerStatus:
        self.asked += 1
        return self.status

    def row(self) -> dict[str, Any]:
        (row,) = self.board.own()["endpoints"]
        return dict(zip(COLUMNS, row, strict=True))


def test_a_row_has_the_load_from_all_pickers_and_the_time_until_the_backlog_is_computed() -> None:
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
    row = BoardPage(status_of_endpoint(ready=False, left_out="half of its answers failed")).row()
    assert (row["state"], row["why"]) == ("out", "half of its answers failed")
    assert (row["waiting"], row["kv"], row["mirror"], row["backlog_s"]) == (None, None, None, 0.0)


def test_hit_rates_are_those_of_the_last_samples_and_the_spark_line_is_the_backlog() -> None:
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


def test_counters_of_a_server_that_started_again_give_no_rate_out_of_bounds() -> None:
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
    first = page.board.own()
    page.clock.now += seconds - 0.1
    assert page.board.own() is first
    page.clock.now += 0.1
    assert page.board.own() is not first
    assert page.asked == 2


async def test_without_other_pickers_the_packed_page_is_our_own_part() -> None:
    page = BoardPage(status_of_endpoint())
    packed = await page.board.packed()
    assert json.loads(gzip.decompress(packed)) == json.loads(json.dumps(page.board.own()))
    assert await page.board.packed() is packed


def test_requests_and_waiting_tenants_are_shown_in_bounded_text() -> None:
    page = BoardPage(status_of_endpoint())
    page.ring.append(decision("r1", model="m" * 600))
    page.ring.append(Refusal(request_id="r2", at_unix_s=5.0, status=503, reason="no_endpoint", message="m"))
    waiting = [WaitingTenant(tenant="t" * 600, priority=1, requests=2, tokens=300)] * 20
    flow = FlowStatus(
        model="m", saturation=0.5, oldest_s=1.25, requests={1: 40}, tokens={1: 6000}, tenants=waiting
    )
    page.status = replace(page.status, flow=[flow])
    own = page.board.own()
    refused, routed = own["requests"]
    assert (refused["id"], refused["status"], "model" in refused) == ("r2", 503, False)
    assert (routed["id"], len(routed["model"]), routed["matched"]) == ("r1", 80, 600)
    (queue,) = own["queue"]
    assert (queue["priorities"], len(queue["tenants"]), len(queue["tenants"][0]["tenant"])) == (
        {"1": 40},
        10,
        80,
    )


def test_the_part_for_another_picker_has_no_servers_and_can_be_read_back() -> None:
    explained = {"requests": 3, "prompt_tokens": 10, "matched_tokens": 4, "causes": []}
    page = BoardPage(status_of_endpoint(), explain=lambda _: explained)
    part = page.board.part()
    assert (part["endpoints"], part["prefixes"]) == ([], [])
    read = part_of(json.dumps(part).encode())
    assert read is not None
    assert read["picker"] == part["picker"]
    assert part_of(json.dumps(part | {"columns": ["name"]}).encode()) is None, "another version"
    assert part_of(b"[]") is None
    assert part_of(b"<html>") is None


def part(picker: str, **more: Any) -> dict[str, Any]:
    usual = {"picker": picker, "overload": 0.0, "requests": [], "queue": [], "dry_run": None}
    return usual | {"explain": {"requests": 0}} | more


def test_several_pickers_show_their_requests_by_time_and_the_worst_overload() -> None:
    own = part("a", requests=[{"at": 1.0}, {"at": 3.0}], overload=0.1, endpoints=["mine"])
    other = part("b", requests=[{"at": n / 10} for n in range(60)], overload=0.5, queue=["held"])
    page = merged(own, [other])
    assert (page["pickers"], page["overload"], page["queue"], page["endpoints"]) == (
        2,
        0.5,
        ["held"],
        ["mine"],
    )
    times = [request["at"] for request in page["requests"]]
    assert len(times) == 40
    assert times == sorted(times, reverse=True)


def test_accounts_of_several_pickers_are_added_by_cause() -> None:
    def account(tokens: int, server: str) -> dict[str, Any]:
        cause = {"cause": "new", "tokens": tokens, "servers": [server] * 6}
        return {"requests": 1, "prompt_tokens": 100, "matched_tokens": 40, "causes": [cause]}

    merged_account = merged(part("a", explain=account(20, "x")), [part("b", explain=account(40, "y"))])[
        "explain"
    ]
    assert (merged_account["requests"], merged_account["hit_ratio"]) == (2, 0.4)
    (cause,) = merged_account["causes"]
    assert (cause["tokens"], cause["share_of_missed"], cause["share_of_prompt"]) == (60, 1.0, 0.3)
    assert cause["servers"] == ["x"] * 6 + ["y"] * 4


def test_only_pickers_with_the_same_policy_in_dry_run_are_added() -> None:
    own = part("a", dry_run={"policy": "p", "picks": 2})
    same = part("b", dry_run={"policy": "p", "picks": 3})
    other = part("c", dry_run={"policy": "q", "picks": 100})
    tried = merged(own, [same, other, part("d")])["dry_run"]
    assert tried == {"policy": "p", "picks": 5}
    assert merged(part("a"), [part("b")])["dry_run"] is None
