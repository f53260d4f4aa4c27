"""Debian's promtool runs each alert on two made-up stories: one in which the alert fires, and one that stays
just within its bound. Ranges and waiting times are those of the chart.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from tests.charts.test_monitoring import ALERTS, expressions
from tests.harness.promtool import promtool

pytestmark = pytest.mark.processes

SELECTOR: Final = 'namespace="n",service="s"'
HOURS: Final = 3
LONGER: Final = {"MemoryGrows": 16}
"""Hours of stories that have to be longer."""
GATEWAY: Final = 'envoy_http_conn_manager_prefix="gateway"'
BREAKERS: Final = ("upstream_rq_pending", "upstream_rq_active", "upstream_rq_retry", "upstream_cx")
Story = Mapping[str, float | tuple[float, float]]
"""Series with their labels, each with its value, or with its first value and what a minute adds."""


def each_minute(number: float) -> tuple[float, float]:
    return 0.0, number


def breakers(more: float) -> Story:
    return {
        f'envoy_cluster_{name}_overflow{{envoy_cluster_name="picker"}}': each_minute(more)
        for name in BREAKERS
    }


def late(share: float) -> Story:
    """Return a loop that is later than 0.1 s in this share of its turns."""
    return {
        'epp_loop_lag_seconds_bucket{le="0.1"}': each_minute(100 * (1 - share)),
        'epp_loop_lag_seconds_bucket{le="1"}': each_minute(100),
        'epp_loop_lag_seconds_bucket{le="+Inf"}': each_minute(100),
    }


def slow(seconds: float) -> Story:
    """Return four servers, one of which takes this long to begin an answer. The others take 0.3 s."""
    taken = {"a": 0.3, "b": 0.3, "c": 0.3, "d": seconds}
    times = {
        f'epp_time_to_headers_seconds_total{{endpoint="{name}"}}': each_minute(60 * s)
        for name, s in taken.items()
    }
    return times | {f'epp_answers_total{{endpoint="{name}"}}': each_minute(60) for name in taken}


def ratio(over: str, under: str, share: float) -> Story:
    return {over: each_minute(1000 * share), under: each_minute(1000)}


STORIES: Final[Mapping[str, tuple[Story, ...]]] = {
    "Bypassed": tuple(
        ratio("envoy_http_ext_proc_failure_mode_allowed", "envoy_http_ext_proc_streams_started", share)
        for share in (0.011, 0.01)
    ),
    "BreakerOverflow": (breakers(1), breakers(0)),
    "EnvoyFull": (
        {f"envoy_http_downstream_rq_overload_close{{{GATEWAY}}}": each_minute(1)},
        {'envoy_http_downstream_rq_overload_close{envoy_http_conn_manager_prefix="admin"}': each_minute(1)},
    ),
    "PickerUnhealthy": tuple(
        {
            'envoy_cluster_membership_healthy{envoy_cluster_name="picker"}': healthy,
            'envoy_cluster_membership_total{envoy_cluster_name="picker"}': 2,
        }
        for healthy in (1, 2)
    ),
    "NoEndpoints": ({"epp_draining": 0}, {"epp_draining": 0, 'epp_endpoint_ready{endpoint="a"}': 1}),
    "Errors": tuple(
        ratio(
            f'envoy_http_downstream_rq_xx{{{GATEWAY},envoy_response_code_class="5"}}',
            f"envoy_http_downstream_rq_completed{{{GATEWAY}}}",
            share,
        )
        for share in (0.021, 0.02)
    ),
    "ReloadRefused": ({'epp_reload_ok{source="policy"}': 0}, {'epp_reload_ok{source="policy"}': 1}),
    "PickerLate": (late(0.02), late(0.005)),
    "Overloaded": ({"epp_overload_ratio": 0.06}, {"epp_overload_ratio": 0.05}),
    "FilesRunOut": (
        {"process_open_fds": 81, "process_max_fds": 100},
        {"process_open_fds": 80, "process_max_fds": 100},
    ),
    "MemoryGrows": tuple(
        {"process_resident_memory_bytes": (1e8, bytes_a_day / 1440), "process_start_time_seconds": 0}
        for bytes_a_day in (210e6, 190e6)
    ),
    "SourceFails": (
        {'epp_source_failures_total{source="redis"}': each_minute(0.12)},
        {'epp_source_failures_total{source="redis"}': each_minute(0.09)},
    ),
    "ClusterAway": (
        {'epp_kubernetes_followed{resource="pods"}': 1, 'epp_kubernetes_followed{resource="pool"}': 0},
        {'epp_kubernetes_followed{resource="pods"}': 1, 'epp_kubernetes_followed{resource="pool"}': 1},
    ),
    "PolicyRefused": (
        {'epp_kubernetes_policies{state="refused"}': 1},
        {'epp_kubernetes_policies{state="accepted"}': 1},
    ),
    "ExactModeOff": ({'epp_exact_model{state="off"}': 1}, {'epp_exact_model{state="on"}': 1}),
    "SharingAway": ({"epp_sharing_connected": 0}, {"epp_sharing_connected": 1}),
    "PromptsNotSeen": tuple(
        {
            'epp_requests_total{kind="other",outcome="ended"}': each_minute(other),
            'epp_requests_total{kind="chat",outcome="ended"}': each_minute(50),
            'epp_requests_total{kind="chat",outcome="refused"}': each_minute(500),
        }
        for other in (51, 50)
    ),
    "BlindOnLoad": tuple(
        {
            'epp_endpoint_scrape_ok{pod="p",endpoint="a"}': 0,
            'epp_endpoint_scrape_ok{pod="q",endpoint="a"}': of_another_picker,
        }
        for of_another_picker in (0, 1)
    ),
    "ServerEjected": (
        {'epp_endpoint_ejected{endpoint="a"}': 1},
        {'epp_endpoint_ejected{endpoint="a"}': 0},
    ),
    "AnswersFail": tuple(
        {
            'epp_answers_total{endpoint="a",class="404"}': each_minute(refused),
            'epp_answers_total{endpoint="a",class="2xx"}': each_minute(900),
        }
        for refused in (101, 99)
    ),
    "ServerCutsAnswers": tuple(
        ratio('epp_cut_answers_total{endpoint="a"}', 'epp_answers_total{endpoint="a",class="2xx"}', share)
        for share in (0.021, 0.02)
    ),
    "AnswersCut": tuple(
        ratio(
            f"envoy_http_downstream_rq_tx_reset{{{GATEWAY}}}",
            f"envoy_http_downstream_rq_completed{{{GATEWAY}}}",
            share,
        )
        for share in (0.011, 0.01)
    ),
    "SlowToBegin": (slow(1.6), slow(1.4)),
    "FirstChoiceFails": tuple(
        ratio("epp_served_mismatch_total", "epp_picks_total", share) for share in (0.051, 0.05)
    ),
    "TableDisagrees": tuple(
        {
            "epp_sampled_cached_tokens_total": each_minute(found),
            "epp_sampled_predicted_tokens_total": each_minute(2_000),
        }
        for found in (1_380, 1_420)
    ),
}


def story_of(series: Story, *, firing: str, hours: int) -> dict[str, Any]:
    """Return a story in promtool's form. Of all alerts, only `firing` may fire at its end."""
    texts = []
    for name, value in series.items():
        bare, _, labels = name.rstrip("}").partition("{")
        pod = "" if "pod=" in labels else ',pod="p"'
        first, more = value if isinstance(value, tuple) else (value, 0)
        texts.append(
            {
                "series": f"{bare}{{{SELECTOR}{pod}{',' * bool(labels)}{labels}}}",
                "values": f"{first:f}+{more:f}x{60 * hours}",
            }
        )
    fires = {"labels": f'{{alertname="{firing}"}}', "value": 1}
    asked = 'count by (alertname) (ALERTS{alertstate="firing"} >= 1) >= bool 1'
    test = {"expr": asked, "eval_time": f"{hours}h", "exp_samples": [fires] if firing else []}
    return {"interval": "1m", "input_series": texts, "promql_expr_test": [test]}


def test_each_alert_fires_over_its_bound_and_is_quiet_within_it(tmp_path: Path) -> None:
    rules = json.loads(json.dumps({"groups": ALERTS}).replace("$SELECTOR", SELECTOR.replace('"', '\\"')))
    assert {f"PrefixGateway{name}" for name in STORIES} == {
        rule["alert"] for group in ALERTS for rule in group["rules"]
    }
    stories = [
        story_of(series, firing=firing, hours=LONGER.get(name, HOURS))
        for name, both in STORIES.items()
        for series, firing in zip(both, (f"PrefixGateway{name}", ""), strict=True)
    ]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(rules))
    document = {"rule_files": ["rules.yaml"], "evaluation_interval": "5m", "tests": stories}
    (tmp_path / "stories.yaml").write_text(yaml.safe_dump(document))
    promtool("check", "rules", tmp_path / "rules.yaml")
    promtool("test", "rules", tmp_path / "stories.yaml")


def test_prometheus_reads_every_expression_of_the_dashboard(tmp_path: Path) -> None:
    texts = [text for where, text in expressions() if where.startswith(("panel", "annotation"))]
    for name, value in {"$__rate_interval": "1m", "$namespace": "n", "$service": "s"}.items():
        texts = [text.replace(name, value) for text in texts]
    rules = [{"record": f"panel:{number}", "expr": text} for number, text in enumerate(texts)]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    promtool("check", "rules", tmp_path / "rules.yaml")
