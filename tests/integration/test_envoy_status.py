"""The listener for probes and Prometheus of the real Envoy. It shows two pages of Envoy's admin address, read
only, and nothing else.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from epp.base.types import Address
from tests.harness.client import http_client
from tests.harness.gateway import running_bootstrap
from tests.harness.ports import free_port
from tests.harness.raw_http import send_raw

pytestmark = pytest.mark.envoy


async def test_probes_and_prometheus_get_their_page_and_nothing_else(tmp_path: Path) -> None:
    status = f"127.0.0.1:{free_port()}"
    async with (
        running_bootstrap(tmp_path, envoy={"status": status}) as bench,
        http_client(f"http://{status}") as watcher,
    ):
        assert (await bench.client.complete()).status == 200
        assert (await watcher.get("/ready")).body == b"LIVE\n"
        page = (await watcher.get("/stats/prometheus?usedonly")).body.decode()
        assert re.search(
            r'^envoy_cluster_upstream_rq_total\{envoy_cluster_name="picker"\} [1-9]', page, re.MULTILINE
        )
        for path in (
            "/",
            "/config_dump",
            "/certs",
            "/stats",
            "/help",
            "/ready/x",
            "/stats/prometheus/../../config_dump",
        ):
            assert (await watcher.get(path)).status == 404, path
        for path in ("/ready", "/stats/prometheus", "/quitquitquit", "/drain_listeners", "/healthcheck/fail"):
            assert (await watcher.request("POST", path)).status == 404, path
        assert (await watcher.get("/ready")).status == 200
        assert (await bench.client.get("/stats/prometheus")).served_by, (
            "clients of the gateway reach no page of Envoy"
        )


async def test_a_failed_health_check_fails_the_probe(tmp_path: Path) -> None:
    status = f"127.0.0.1:{free_port()}"
    async with (
        running_bootstrap(tmp_path, envoy={"status": status}) as bench,
        http_client(f"http://{status}") as watcher,
        http_client(bench.envoy.admin_url) as admin,
    ):
        assert (await admin.request("POST", "/healthcheck/fail")).status == 200
        assert (await watcher.get("/ready")).status == 503
        assert (await admin.request("POST", "/drain_listeners?inboundonly")).status == 200
        assert (await watcher.get("/ready")).status == 503, (
            "the status page stays when the gateway's port is closed"
        )


async def test_an_unfinished_request_to_the_status_page_gets_408(tmp_path: Path) -> None:
    status = Address("127.0.0.1", free_port())
    async with running_bootstrap(tmp_path, envoy={"status": str(status)}):
        assert (await send_raw(status, b"GET /ready HTTP/1.1\r\nhost: a\r\n")).status == 408
