"""Counted uses as the cache policy of vLLM's CPU offload tier. One test drives vLLM's own manager
alone, as vLLM's scheduler does. One test uses a real server.

vLLM's CPU backend cannot copy for its offload tier, so the server gets plain copies
(`tests/vllm_env/main_memory_offload.py`).
"""

import json
import os
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.vllm_env import server as vllm
from tests.vllm_env import tiny_model
from tests.vllm_env.environment import VllmEnvironment

# The manager's answers and the server's start both wait for an import of vLLM.
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

REPOSITORY = Path(__file__).parents[2]
OURS = "UsesCachePolicy"


@pytest.fixture(scope="module")
def answers(vllm_environment: VllmEnvironment) -> dict[str, Any]:
    command: list[str | Path] = [
        vllm_environment.python,
        "-W",
        "ignore",
        "-m",
        "tests.vllm_env.offload_manager",
    ]
    variables = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VLLM_"))}
    done = subprocess.run(
        command,
        cwd=REPOSITORY,
        env={**variables, "PYTHONPATH": str(REPOSITORY), "VLLM_NO_USAGE_STATS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_chunks_leave_in_the_order_of_uses_and_a_prompt_from_its_tail(answers: dict[str, Any]) -> None:
    assert answers["order"] == ["y", "w1", "w0"]


def test_chunks_in_use_stay_and_a_request_without_room_changes_nothing(answers: dict[str, Any]) -> None:
    assert answers["in flight"] == {
        "refused": True,
        "kept": ["read", "again", "idle"],
        "evicted": ["idle"],
        "unwritten": "HIT_PENDING",
        "none idle": True,
        "then evicted": ["again"],
    }


def test_uses_by_a_request_after_a_reset_count_again(answers: dict[str, Any]) -> None:
    assert answers["after a reset"] == 1


@pytest.mark.parametrize("trace", ["steady", "drifting"])
def test_more_of_a_zipf_trace_is_found_than_with_lru_and_arc(answers: dict[str, Any], trace: str) -> None:
    found = answers[trace]
    for policy, one in found.items():
        print(f"{trace}, {policy}: {', '.join(f'{name} {value:.3g}' for name, value in one.items())}")
    assert found[OURS]["hit rate"] > max(found[policy]["hit rate"] for policy in ("lru", "arc"))


BFLOAT16_BYTES = 2
PROMPT_CHUNKS = 10
CHUNK_BYTES = (
    2 * tiny_model.LAYERS * tiny_model.KV_HEADS * tiny_model.HEAD_DIM * BFLOAT16_BYTES * vllm.BLOCK_TOKENS
)
"""Keys and values of one block."""


def arguments() -> tuple[str, ...]:
    """Return the arguments of a server with room for the chunks of eight prompts in main memory, and with
    copies that this machine can make.
    """
    extra = {
        "cpu_bytes_to_use": 8 * PROMPT_CHUNKS * CHUNK_BYTES,
        "eviction_policy": OURS,
        "cache_policy_module_path": "model_server.pods.vllm.offload_policy",
        "spec_name": "MainMemorySpec",
        "spec_module_path": "tests.vllm_env.main_memory_offload",
    }
    config = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    return ("--max-model-len", "1024", "--enable-prefix-caching", "--kv-transfer-config", json.dumps(config))


@pytest.fixture(scope="module")
def server(
    vllm_environment: VllmEnvironment, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[vllm.VllmServer]:
    options = vllm.ServerOptions(
        cache_blocks=4 * PROMPT_CHUNKS,
        adapters=(),
        arguments=arguments(),
        variables={"PYTHONPATH": str(REPOSITORY)},
    )
    folder = tmp_path_factory.mktemp("offload")
    with vllm.VllmServer(vllm_environment, name="offload", folder=folder, options=options) as running:
        yield running


def answer_of_chunks(server: vllm.VllmServer, name: str) -> str:
    """Return the answer to a prompt of whole chunks and one token more."""
    rng = random.Random(name)
    tokens = [rng.randrange(10, 400) for _ in range(PROMPT_CHUNKS * vllm.BLOCK_TOKENS + 1)]
    body = {"model": vllm.MODEL_NAME, "prompt": tokens, "max_tokens": 8, "temperature": 0}
    answer = server.post("/v1/completions", body)
    assert answer.status == 200, answer.body
    choices = answer.json()["choices"]
    assert isinstance(choices, list)
    return str(choices[0]["text"])


def test_a_real_server_loads_the_policy_and_answers_the_same(server: vllm.VllmServer) -> None:
    first = answer_of_chunks(server, "often")
    for number in range(8):  # twice as much as either cache holds
        answer_of_chunks(server, f"other {number}")
    assert answer_of_chunks(server, "often") == first
    assert "Loading out-of-tree cache policy" in server.log_path.read_text()
