"""Debian's Prometheus as a child process: it scrapes what a test runs, by the rules of a chart, and says
which alerts fire.

The package is unpacked from Debian's archive into the cache under its version, and not installed. The chart's
ServiceMonitor and PrometheusRule become Prometheus's own configuration in the operator's way, with scrapes
each second. Since a test cannot wait for hours, other durations are used where the test says so.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp
import pytest
import yaml

from tests.harness.cached_builds import built_elsewhere, cache_folder, only_builder, run
from tests.harness.ports import free_port
from tests.harness.processes import managed_process, wait_until

_PACKAGE: Final = "prometheus"
_REQUIRE: Final = "PREFIX_GATEWAY_REQUIRE_CLUSTER"
"""The variable that is set where CI runs everything."""
_DURATION: Final = re.compile(r"\[\d+[smhd]\]")


def programs() -> Path:
    """Return the folder of `prometheus` and `promtool`. Skip the test if Debian's archive cannot be
    reached.
    """
    if shutil.which("apt-get") is None:
        said = "Prometheus is taken from Debian's archive, and this is no Debian"
        pytest.fail(said) if os.environ.get(_REQUIRE) else pytest.skip(said)
    with only_builder(_PACKAGE, progress=print):
        final = cache_folder() / f"{_PACKAGE}-{_version()}"
        if not final.exists():
            with built_elsewhere(final) as folder:
                run("apt-get", "download", _PACKAGE, cwd=folder)
                (archive,) = folder.glob("*.deb")
                run("dpkg-deb", "--extract", archive, folder)
                archive.unlink()
    return final / "usr" / "bin"


def _version() -> str:
    """Return the version in the archive, as part of a file's name. The archive's list is fetched if there is
    none yet.
    """
    for fetch in (False, True):
        if fetch:
            run("apt-get", "update", "--quiet")
        shown = subprocess.run(
            ["apt-cache", "policy", _PACKAGE], capture_output=True, text=True, check=True
        ).stdout
        found = re.search(r"Candidate: (\S+)", shown)
        if found and found[1] != "(none)":
            return re.sub(r"[^A-Za-z0-9.]", "-", found[1])
    raise AssertionError(f"the archive has no package {_PACKAGE}")


def shortened(rules: Sequence[Mapping[str, Any]], other: Mapping[str, str], *, window: str) -> dict[str, Any]:
    """Return a PrometheusRule's groups with every range `window` long and each `for:` one second. `other` are
    texts to replace in expressions.
    """

    def expression(text: str) -> str:
        for old, new in other.items():
            text = text.replace(old, new)
        return _DURATION.sub(f"[{window}]", text)

    groups = [
        {
            **group,
            "interval": "1s",
            "rules": [
                {**rule, "expr": expression(rule["expr"]), **({"for": "1s"} if "for" in rule else {})}
                for rule in group["rules"]
            ],
        }
        for group in rules
    ]
    return {"groups": groups}


def scrape_of(
    monitor: Mapping[str, Any], targets: Mapping[str, Mapping[str, str]], *, namespace: str, service: str
) -> list[dict[str, Any]]:
    """Return a ServiceMonitor in the form in which the operator writes it for Prometheus. `targets` are, by
    port name, pods and the addresses of that port.
    """
    return [
        {
            "job_name": f"{service}/{endpoint['port']}",
            "metrics_path": endpoint["path"],
            "scrape_interval": "1s",
            "scrape_timeout": "1s",
            "honor_labels": endpoint.get("honorLabels", False),
            "static_configs": [
                {
                    "targets": [address],
                    "labels": {
                        "namespace": namespace,
                        "service": service,
                        "pod": pod,
                        "container": "c",
                        "endpoint": endpoint["port"],
                    },
                }
                for pod, address in targets[endpoint["port"]].items()
            ],
            "relabel_configs": [_relabeling(each) for each in endpoint.get("relabelings", ())],
            "metric_relabel_configs": [_relabeling(each) for each in endpoint.get("metricRelabelings", ())],
        }
        for endpoint in monitor["spec"]["endpoints"]
        if endpoint["port"] in targets
    ]


def _relabeling(told: Mapping[str, Any]) -> dict[str, Any]:
    names = {
        "sourceLabels": "source_labels",
        "targetLabel": "target_label",
        **{k: k for k in ("regex", "action")},
    }
    return {names[key]: value for key, value in told.items()}


@dataclass(slots=True)
class Prometheus:
    """A Prometheus that runs."""

    url: str
    session: aiohttp.ClientSession

    async def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the series of an instant query. Raise an AssertionError with Prometheus's own message if
        Prometheus does not understand the query.
        """
        async with self.session.get(f"{self.url}/api/v1/query", params={"query": expression}) as response:
            document = await response.json()
        assert document["status"] == "success", f"{expression}: {document}"
        result: list[dict[str, Any]] = document["data"]["result"]
        return result

    async def firing(self) -> set[str]:
        """Return the names of the alerts that fire now."""
        async with self.session.get(f"{self.url}/api/v1/alerts") as response:
            alerts = (await response.json())["data"]["alerts"]
        return {alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"}

    async def wait_firing(
        self, wanted: set[str], *, while_: Callable[[], None] = lambda: None, timeout_s: float = 90.0
    ) -> set[str]:
        """Wait until each of `wanted` has fired at some time. Return all alerts that fired meanwhile."""
        seen: set[str] = set()

        async def all_seen() -> bool:
            while_()
            seen.update(await self.firing())
            return wanted <= seen

        try:
            await wait_until(all_seen, what=f"{sorted(wanted)} fire", timeout_s=timeout_s)
        except AssertionError as error:
            raise AssertionError(f"did not fire: {sorted(wanted - seen)}; did: {sorted(seen)}") from error
        return seen

    async def wait_quiet(self, *, timeout_s: float = 90.0) -> None:
        """Wait until no alert fires."""
        last: set[str] = set()

        async def quiet() -> bool:
            nonlocal last
            last = await self.firing()
            return not last

        try:
            await wait_until(quiet, what="no alert fires", timeout_s=timeout_s)
        except AssertionError as error:
            raise AssertionError(f"still firing: {sorted(last)}") from error


def checked_rules(rules: Mapping[str, Any], path: Path) -> None:
    """Write `rules` to `path`. promtool must find nothing wrong with them."""
    path.write_text(yaml.safe_dump(dict(rules)))
    done = subprocess.run(
        [str(programs() / "promtool"), "check", "rules", str(path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@asynccontextmanager
async def running_prometheus(
    directory: Path, *, scrapes: Sequence[Mapping[str, Any]], rules: Mapping[str, Any]
) -> AsyncIterator[Prometheus]:
    binary = programs() / "prometheus"
    checked_rules(rules, directory / "rules.yaml")
    config = directory / "prometheus.yaml"
    document = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(directory / "rules.yaml")],
        "scrape_configs": [dict(each) for each in scrapes],
    }
    config.write_text(yaml.safe_dump(document))
    port = free_port()
    arguments = [
        f"--config.file={config}",
        f"--storage.tsdb.path={directory / 'tsdb'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--query.lookback-delta=5s",
    ]
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as session,
        managed_process("prometheus", [binary, *arguments], directory=directory) as process,
    ):
        prometheus = Prometheus(f"http://127.0.0.1:{port}", session)

        async def ready() -> bool:
            try:
                async with session.get(f"{prometheus.url}/-/ready") as response:
                    return response.status == 200
            except aiohttp.ClientConnectionError:
                return False

        await process.wait_ready(ready)
        yield prometheus
