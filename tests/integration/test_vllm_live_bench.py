"""A run of the live comparison before real vLLM servers. Conversations are answered and hit the cache, and
both sides report the number of tokens.
"""

from __future__ import annotations

from pathlib import Path

import aiohttp
import pytest

from bench.gpu.gateway import large_model
from bench.routing.live import vllm, vllm_fleet
from bench.routing.live.vllm_fleet import Setting
from tests.vllm_env.server import ServerOptions, VllmServer

pytest_plugins = ["tests.harness.fixtures", "tests.vllm_env.fixtures"]
pytestmark = [pytest.mark.envoy, pytest.mark.vllm]


@pytest.mark.timeout(900)
async def test_conversations_run_before_vllm_and_the_run_has_learned_and_true_cache_sizes(
    vllm_servers: tuple[VllmServer, VllmServer], tmp_path: Path
) -> None:
    setting = Setting(servers=2, cache_blocks=ServerOptions().cache_blocks, users=4, probe_tokens=64)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
        speed = await vllm_fleet.probe(setting, session, vllm_servers)
        run = await vllm.one_run(
            "least-cost",
            setting=setting,
            seed=1,
            seconds=6.0,
            speed=speed,
            servers=vllm_servers,
            session=session,
            directory=tmp_path,
        )
    assert run.failures == []
    assert run.live.completed == run.simulated.completed == 1
    assert run.live.requests >= 4
    assert run.counted_hit_share > 0, "the system prompts are shared"
    assert run.true_cache_tokens == setting.cache_tokens
    assert [round(one.table_tokens) for one in run.believed] == [setting.cache_tokens] * 2
    assert 1 < run.true_bytes_per_token < 8
    assert any(rate is not None and rate > 0 for rate in run.true_prefill_tokens_per_s)


def test_the_large_model_of_the_gpus_bench_is_of_8_billion_parameters(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    model = large_model(tmp_path / "model")
    config = (model / "config.json").read_text()
    assert '"hidden_size": 4096' in config
    assert '"vocab_size": 4096' in config
    assert (model / "tokenizer.json").exists()
