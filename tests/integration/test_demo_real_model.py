"""`make run MODEL=...` with a tiny random model in place of SmolLM2."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests import engine_env
from tests.harness.prepared import prepared
from tests.vllm_env import tiny_model
from tests.vllm_env.environment import REQUIRED, VllmEnvironment

pytestmark = [pytest.mark.envoy, pytest.mark.vllm]


@pytest.fixture
def tiny(vllm_environment: VllmEnvironment) -> Path:
    """Return the files of a tiny model. They were written for vLLM, and any engine can compute the model."""
    prepared(engine_env.require, required_by=REQUIRED)
    return vllm_environment.model_folder / tiny_model.MODEL


def test_a_real_model_serves_the_demos_work_and_its_words_come_back(tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    with tempfile.TemporaryDirectory(prefix="demo-") as short_tmp:
        done = subprocess.run(
            [
                *(sys.executable, "-m", "bench.demo", "--once", "--model", tiny, "--json", file),
                *("--rules", "least-cost", "--requests", "9", "--servers", "1"),
            ],
            capture_output=True,
            text=True,
            check=False,
            timeout=280,
            env={**os.environ, "TMPDIR": short_tmp},
        )
        assert done.returncode == 0, done.stdout + done.stderr
    [entry] = json.loads(file.read_text())["rules"]
    assert (entry["requests"], entry["failed"]) == (9, 0)
    assert 0 < entry["hit_tokens"] < entry["queried_tokens"]
    _, _, answered = done.stdout.partition("Through the gateway: What is the capital of France?\n")
    assert answered.strip(), done.stdout
