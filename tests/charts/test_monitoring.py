"""Dashboard and alerts ask only for metrics and labels that the picker and the real Envoy have."""

import copy
import itertools
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final

import aiohttp
import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from tests.charts.rendering import GATEWAY, Helm, of_kind
from tests.harness.gateway import running_bootstrap
from tests.harness.ports import free_port
from tests.reference.pages import METRICS

DASHBOARD: Final = json.loads((GATEWAY / "files" / "dashboard.json").read_text())
ALERTS: Final = yaml.safe_load((GATEWAY / "files" / "alerts.yaml").read_text())

OF_PROMETHEUS: Final = {"namespace", "service", "pod", "container", "endpoint", "le"}
"""The labels that the operator's scrape adds, and the label of histograms' buckets."""

PROCESS: Final = {
    *("process_cpu_seconds_total", "process_resident_memory_bytes", "process_start_time_seconds"),
    *("process_open_fds", "process_max_fds"),
}

_SERIES: Final = re.compile(r"\b((?:epp|envoy|process|vllm)[_:][a-z0-9_:]+)(?:\{([^}]*)\})?")
_MATCHER: Final = re.compile(r'(\w+)\s*(?:=~|!~|!=|=)\s*"')
_GROUPING: Final = re.compile(r"\b(?:by|without|on)\s*\(([^)]*)\)")


@cache
def known() -> dict[str, set[str]]:
    """Map each metric of the picker, named as Prometheus stores it, to its labels."""
    found: dict[str, set[str]] = {name: set() for name in PROCESS}
    for spec in METRICS:
        names = (
            [f"{spec.name}_{end}" for end in ("bucket", "sum", "count")]
            if spec.kind == "histogram"
            else [spec.name]
        )
        found |= {name: set(spec.labels) for name in names}
    return found


def expressions() -> Iterator[tuple[str, str]]:
    """Return each expression with the place where it stands."""
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            yield f"panel {panel['title']}", target["expr"]
    for annotation in DASHBOARD["annotations"]["list"]:
        yield f"annotation {annotation['name']}", annotation["expr"]
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            yield f"variable {variable['name']}", variable["query"]["query"]
    for group in ALERTS:
        for rule in group["rules"]:
            yield f"alert {rule['alert']}", rule["expr"].replace("$SELECTOR", 'namespace="x",service="y"')


def series_of(text: str) -> Iterator[tuple[str, set[str]]]:
    for match in _SERIES.finditer(_GROUPING.sub("", text)):
        yield match[1], set(_MATCHER.findall(match[2] or ""))


EACH = pytest.mark.parametrize(("where", "text"), list(expressions()), ids=lambda each: str(each)[:40])


@EACH
def test_the_pickers_metrics_exist_with_the_labels_that_are_asked_for(where: str, text: str) -> None:
    asked = list(series_of(text))
    assert asked, "an expression over metrics"
    for name, labels in asked:
        if name.startswith("envoy_"):
            continue
        assert name in known(), f"{where}: {name} is not in the catalogue"
        assert labels <= known()[name] | OF_PROMETHEUS, f"{where}: {name}"


@pytest.mark.envoy
async def test_envoys_metrics_exist_in_the_version_that_is_deployed(tmp_path: Path) -> None:
    status = f"127.0.0.1:{free_port()}"
    async with (
        running_bootstrap(tmp_path, envoy={"status": status}) as bench,
        aiohttp.ClientSession() as session,
    ):
        assert (await bench.client.complete()).status == 200
        async with session.get(f"http://{status}/stats/prometheus") as response:
            page = await response.text()
    served: dict[str, set[str]] = {}
    for line in page.splitlines():
        if not line.startswith("#"):
            name, _, rest = line.partition("{")
            served.setdefault(name, set()).update(re.findall(r'(\w+)="', rest))
    for where, text in expressions():
        for name, labels in series_of(text):
            if name.startswith("envoy_"):
                assert name in served, f"{where}: Envoy has no {name}"
                assert labels <= served[name] | OF_PROMETHEUS, f"{where}: {name}"
    for value in re.findall(r'envoy_cluster_name=~?"([^"]*)"', " ".join(text for _, text in expressions())):
        for cluster in value.split("|"):
            assert f'envoy_cluster_name="{cluster}"' in page


def test_every_panel_says_what_it_shows_and_no_panels_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24, panel["title"]
        taken |= cells
        if panel["type"] != "row":
            assert len(panel["description"]) > 20, panel["title"]
            assert panel["fieldConfig"]["defaults"].get("unit") or panel["type"] == "heatmap", panel["title"]
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def test_every_alert_says_what_to_do() -> None:
    rules = [rule for group in ALERTS for rule in group["rules"]]
    assert len({rule["alert"] for rule in rules}) == len(rules)
    for rule in rules:
        assert rule["labels"]["severity"] in {"page", "ticket"}
        assert rule["annotations"]["summary"], rule["alert"]
        assert len(rule["annotations"]["description"]) > 40, rule["alert"]
    asked = {name for rule in rules for name, _ in series_of(rule["expr"].replace("$SELECTOR", ""))}
    assert {
        "envoy_http_ext_proc_failure_mode_allowed",
        "envoy_cluster_upstream_rq_pending_overflow",
        "envoy_cluster_upstream_rq_retry_overflow",
    } <= asked, "these counters show that requests bypass the picker"


@pytest.mark.cluster
def test_prometheus_keeps_the_metrics_of_dashboard_and_alerts(helm: Helm) -> None:
    values = {"monitoring": {"serviceMonitor": {"enabled": True}, "rules": {"enabled": True}}}
    objects = helm.render(GATEWAY, values)
    ports = {each["port"]: each for each in of_kind(objects, "ServiceMonitor")["spec"]["endpoints"]}
    envoy, picker = ports["envoy-metrics"], ports["metrics"]
    dropped = {"action": "labeldrop", "regex": "endpoint"}
    assert dropped in picker["relabelings"], "the label names a model server, not the port that was asked"
    keep = re.compile(envoy["metricRelabelings"][0]["regex"])
    for where, text in expressions():
        for name, _ in series_of(text):
            assert not name.startswith("envoy_") or keep.fullmatch(name), f"{where}: {name} is dropped"
    rules = of_kind(objects, "PrometheusRule")["spec"]["groups"][0]["rules"]
    assert all('service="gateway-prefix-gateway-metrics"' in rule["expr"] for rule in rules)
    assert "$SELECTOR" not in json.dumps(rules)


def lost(ours: Any, theirs: Any, where: str = "") -> Iterator[str]:
    """Return the fields of `ours` that are missing from `theirs` or have another value there."""
    if isinstance(ours, dict):
        for name, value in ours.items():
            if not isinstance(theirs, dict) or name not in theirs:
                yield f"{where}.{name}"
            else:
                yield from lost(value, theirs[name], f"{where}.{name}")
    elif isinstance(ours, list):
        pairs = itertools.zip_longest(ours, theirs if isinstance(theirs, list) else [])
        for number, (one, other) in enumerate(pairs):
            yield from lost(one, other, f"{where}[{number}]")
    elif ours != theirs:
        yield where


def test_grafanas_own_schema_knows_every_field_of_the_dashboard() -> None:
    """Grafana Labs' types of dashboards, panels and queries read the dashboard and write it again. Fields
    that Grafana would not read are missing from the second text.
    """
    register_default_plugins()
    read = Dashboard.from_json(copy.deepcopy(DASHBOARD))
    written = json.loads(JSONEncoder().encode(read))
    unknown = {each for each in lost(DASHBOARD, written) if not each.startswith(".annotations.list[0].")}
    # The schema does not check the content of an annotation, which belongs to the data source. Prometheus has
    # both of these.
    of_prometheus = {each.rpartition(".")[2] for each in lost(DASHBOARD, written)} - {
        "titleFormat",
        "textFormat",
    }
    assert (unknown, of_prometheus) == (set(), set())
