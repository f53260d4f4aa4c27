"""The list of all metrics: names that Prometheus accepts, each once, with a place where its objects are."""

import re
from collections import Counter

from epp.base.types import EndpointName
from epp.observe.telemetry.counts import ProcessCounts, RequestCounts, ServerCounts
from epp.observe.telemetry.metrics import GROUPS, objects
from epp.observe.telemetry.picker_state import EndpointStatus, PickerStatus
from epp.observe.telemetry.pool_status import PoolStatus
from epp.picker.flow.accounts import FlowStatus
from epp.picker.prefix_index.reported import ExactModelStatus, ExactServerStatus, ExactStatus
from epp.sources.sharing_status import SharingStatus
from tests.reference.pages import METRICS
from tests.unit.observe.telemetry.records import HERE

A = EndpointName("a")


def test_each_metric_has_its_own_name_by_the_conventions_of_prometheus() -> None:
    assert [name for name, count in Counter(m.name for m in METRICS).items() if count > 1] == []
    for metric in METRICS:
        assert re.fullmatch(r"epp_[a-z0-9_]+", metric.name)
        assert (metric.kind == "counter") == metric.name.endswith("_total"), metric.name
        assert all(re.fullmatch(r"[a-z_]+", label) for label in metric.labels)
        assert len(set(metric.labels)) == len(metric.labels)


def test_each_help_text_is_a_sentence_without_characters_that_break_table() -> None:
    for metric in METRICS:
        assert metric.help.endswith("."), metric.name
        assert "|" not in metric.help
        assert "  " not in metric.help


def test_the_metrics_that_a_help_text_names_exist() -> None:
    names = {metric.name for metric in METRICS}
    for metric in METRICS:
        assert set(re.findall(r"\bepp_\w+", metric.help)) <= names, metric.name


def test_parts_that_are_off_have_no_rows() -> None:
    model = ExactModelStatus(state="on", reason="", prompts={})
    server = ExactServerStatus(state="following", reason="", blocks=1, events=1)
    exact = ExactStatus(models={"m": model}, servers={A: server}, gaps={}, malformed=0)
    on = PickerStatus(
        endpoints=(EndpointStatus(name=A, address=HERE.text, prefill_tokens_per_s=1.0),), exact=exact
    )
    found = list(objects(on))
    labels = {group.of: group.labels for group in GROUPS}
    assert labels.keys() - {type(thing) for _, thing in found} == {
        RequestCounts,
        ServerCounts,
        ProcessCounts,
        SharingStatus,
        FlowStatus,
    }
    assert [values for values, thing in found if isinstance(thing, ExactModelStatus)] == [("m",)]
    assert [values for values, thing in found if isinstance(thing, PoolStatus)] == [("", "")]
    for values, thing in found:
        assert len(values) == len(labels[type(thing)])
    assert [type(thing) for _, thing in objects(PickerStatus())] == [PickerStatus]
