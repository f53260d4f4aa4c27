"""`make bench-gpu ARGS=--tiny`: every step of the command runs on the CPU, also the two vLLM servers behind
the gateway.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.gpu import steps
from tests import engine_env
from tests.harness.prepared import prepared
from tests.vllm_env.environment import VllmEnvironment

pytestmark = [pytest.mark.envoy, pytest.mark.vllm, pytest.mark.slow]


@pytest.mark.timeout(1800)
def test_every_step_runs_at_tiny_sizes_and_the_next_run_finds_them_done(
    vllm_environment: VllmEnvironment, tmp_path: Path
) -> None:
    prepared(engine_env.require, required_by="PREFIX_GATEWAY_REQUIRE_VLLM")
    command = [sys.executable, "-m", "bench.gpu", "--tiny", "--folder", str(tmp_path), "--limit-s", "1500"]
    first = subprocess.run(command, capture_output=True, text=True, check=False)
    outcomes = json.loads((tmp_path / "state.json").read_text())
    page = (tmp_path / "page.md").read_text()
    assert [one["name"] for one in outcomes] == [step.name for step in steps.tiny()]
    assert {one["status"] for one in outcomes} == {"done"}, page
    assert first.returncode == 0
    assert "without / with" in page
    assert "least-cost" in page
    assert len(list(tmp_path.glob("*.json"))) == 1 + len(outcomes)
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert again.returncode == 0
    assert "---" not in again.stdout.split("# Rows")[0], "no step runs again"
