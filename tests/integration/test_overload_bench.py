"""The overload of docs/flow-control.md, in its short form:
a real Envoy, the picker, two model servers, locust."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.envoy]


def test_users_of_every_tenant_and_priority_are_answered_or_refused_by_flow_control_alone() -> None:
    command = [sys.executable, "-m", "bench.load.overload", "--seconds", "10", "--users", "60"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr
    rows = re.findall(r"^\| ([a-z-]+(?: interactive)?) \| (\d+) ", ended.stdout, re.MULTILINE)
    tenants = ("greedy", "light-a", "light-b")
    assert {name for name, _ in rows} == {*tenants, *(f"{tenant} interactive" for tenant in tenants)}
    kinds = re.search(r"failed by kind: (\{.*\})", ended.stdout)
    assert kinds is not None
    assert set(re.findall(r"'([^']+)'", kinds.group(1))) <= {"status 429"}
    assert "prompt tokens of priority 0 by tenant: " in ended.stdout
    waited = re.search(r"most requests that waited at once: (\d+)", ended.stdout)
    assert waited is not None
    assert int(waited.group(1)) > 0
