"""Fixtures that give real vLLM servers to tests, which are marked `vllm`.

Two servers start once a run, about a minute after the first test asks. If the environment is not built, the
tests are skipped and name the command that builds it, or fail if PREFIX_GATEWAY_REQUIRE_VLLM=1.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.harness.prepared import prepared
from tests.vllm_env import environment, server


@pytest.fixture(scope="session")
def vllm_environment() -> environment.VllmEnvironment:
    return prepared(environment.require, required_by=environment.REQUIRED)


@pytest.fixture(scope="session")
def _two_servers(
    vllm_environment: environment.VllmEnvironment, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[server.VllmServer, server.VllmServer]]:
    folder = tmp_path_factory.mktemp("vllm")
    first, second = (
        server.VllmServer(
            vllm_environment,
            name=name,
            folder=folder,
            options=server.ServerOptions(
                kv_events_socket=folder / f"{name}.events",
                # for /reset_prefix_cache, and for follow-ups of responses
                variables={"VLLM_SERVER_DEV_MODE": "1", "VLLM_ENABLE_RESPONSES_API_STORE": "1"},
            ),
        )
        for name in ("first", "second")
    )
    server.start_all([first, second])
    yield first, second
    for running in (first, second):
        running.stop()


@pytest.fixture
def vllm_servers(
    _two_servers: tuple[server.VllmServer, server.VllmServer],
) -> tuple[server.VllmServer, server.VllmServer]:
    """Return two servers that run. A server that an earlier test killed runs again. Their caches hold the
    prompts of earlier tests. They publish KV events on the topic `kv-events`.
    """
    dead = [one for one in _two_servers if not one.running]
    server.start_all(dead)
    return _two_servers
