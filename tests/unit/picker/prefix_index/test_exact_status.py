"""The state of exact mode on Prometheus's page."""

from __future__ import annotations

from dataclasses import fields
from typing import get_args

import pytest
from prometheus_client.parser import text_string_to_metric_families

from epp.base.metric import Metric
from epp.base.types import Address, EndpointName
from epp.observe.telemetry.decisions import DecisionRing
from epp.observe.telemetry.metrics import Metrics
from epp.observe.telemetry.picker_state import EndpointStatus, PickerStatus
from epp.picker.prefix_index.reported import ExactModelStatus, ExactServerStatus, ExactStatus, ModelState

A = EndpointName("a")
SERVER = ExactServerStatus(state="following", reason="", blocks=70, events=300)


def exact_samples(status: ExactStatus) -> dict[str, dict[tuple[str, ...], float]]:
    """Return the values of exact mode's metrics, by name and labels."""
    endpoint = EndpointStatus(name=A, address=Address("10.0.0.1", 8000))
    picker = PickerStatus(endpoints=(endpoint,), exact=status)
    metrics = Metrics(decisions=DecisionRing(maxlen=1), state=lambda: picker)
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(b"".join(metrics.pieces()).decode()):
        for sample in family.samples:
            if sample.name.startswith("epp_exact") and not sample.name.endswith("_created"):
                labels = tuple(value for _, value in sorted(sample.labels.items()))
                found.setdefault(sample.name, {})[labels] = sample.value
    return found


def a_status(state: ModelState = "on") -> ExactStatus:
    return ExactStatus(
        models={"m": ExactModelStatus(state=state, reason="why", prompts={"mapped": 9})},
        servers={A: SERVER},
        gaps={"found": 3, "lost": 1},
        malformed=4,
        dropped_prompts=2,
        corrections={"credited": 5, "forgotten": 6},
    )


def test_each_field_with_a_metric_is_on_the_page_and_nothing_else_is() -> None:
    declared = {
        each.metadata["metric"].name
        for kind in (ExactStatus, ExactModelStatus, ExactServerStatus)
        for each in fields(kind)
        if isinstance(each.metadata.get("metric"), Metric)
    }
    assert exact_samples(a_status()).keys() == declared


def test_numbers_stand_beside_the_labels_that_their_fields_declare() -> None:
    page = exact_samples(a_status())
    assert page["epp_exact_prompts_total"] == {("m", "mapped"): 9}
    assert page["epp_exact_endpoint_blocks"] == {("a",): 70}
    assert page["epp_exact_endpoint_events_total"] == {("a",): 300}
    assert page["epp_exact_gaps_total"] == {("found",): 3, ("lost",): 1}
    assert page["epp_exact_malformed_total"] == {(): 4}
    assert page["epp_exact_dropped_prompts_total"] == {(): 2}
    assert page["epp_exact_corrections_total"] == {("credited",): 5, ("forgotten",): 6}


@pytest.mark.parametrize("state", get_args(ModelState))
def test_a_models_state_is_one_series_and_its_help_explains_the_state(state: ModelState) -> None:
    assert exact_samples(a_status(state))["epp_exact_model"] == {("m", state): 1}
    [metric] = [each.metadata["metric"] for each in fields(ExactModelStatus) if each.name == "state"]
    assert state in metric.help


def test_counters_that_were_not_filled_in_are_zero() -> None:
    page = exact_samples(ExactStatus(models={}, servers={}, gaps={}, malformed=0))
    assert page == {"epp_exact_malformed_total": {(): 0}, "epp_exact_dropped_prompts_total": {(): 0}}
