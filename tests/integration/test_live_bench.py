"""The live part of the routing comparison, for some seconds: a real picker and a rule without a picker,
before real model servers.
"""

from __future__ import annotations

from pathlib import Path

import aiohttp
import pytest

from bench.routing.live.run import Case, live, settled
from bench.routing.live.small import server_flags
from tests.harness.model_servers import running_model_servers

pytest_plugins = ["tests.harness.fixtures"]
pytestmark = pytest.mark.envoy


async def test_the_same_requests_run_live_with_pickers_and_with_a_rule_without_a_picker(
    tmp_path: Path,
) -> None:
    async with (
        running_model_servers(tmp_path, count=2, flags=server_flags()) as servers,
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session,
    ):
        for case in (
            Case("lora", "least-cost*2", 1, 2.0, grace_s=120.0),
            Case("b2b", "sgl", 1, 2.0, grace_s=120.0),
            Case("chat", "round-robin", 1, 2.0, grace_s=120.0),
        ):
            folder = tmp_path / case.workload
            folder.mkdir()
            await settled(session, servers)
            result = await live(case, servers=servers, session=session, directory=folder)
            assert result.failures == ()
            assert result.row.completed == 1
            assert result.row.hit_ratio > 0
            assert result.row.load_cov > 0, "Envoy's log names the server of each request"
            assert result.lateness is not None
            assert result.lateness.ran_share["servers"] > 0
