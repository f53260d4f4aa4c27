"""Credentials that expire are read from the kubeconfig again, but not after every refusal."""

import json
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web

from epp.config.sections import Kubernetes
from epp.sources.kube.api import Api, ApiError
from tests.harness.kubeconfig import write_kubeconfig
from tests.harness.listening import serving

pytest.importorskip("kubernetes")

ISSUED = {"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential"}


@dataclass
class TokenServer:
    """A server that accepts one bearer token."""

    url: str = ""
    token: str = "first"
    heard: list[str] = field(default_factory=list)

    async def answer(self, request: web.Request) -> web.Response:
        self.heard.append(request.headers.get("Authorization", "").partition(" ")[2])
        if self.heard[-1] != self.token:
            return web.json_response({"message": "Unauthorized", "code": 401}, status=401)
        return web.json_response({"items": []})


@pytest_asyncio.fixture
async def server() -> AsyncIterator[TokenServer]:
    made = TokenServer()
    app = web.Application()
    app.router.add_get("/api/v1/pods", made.answer)
    async with serving(app) as port:
        made.url = f"http://127.0.0.1:{port}"
        yield made


def by_file(token: Path) -> dict[str, Any]:
    return {"tokenFile": str(token)}


def by_command(token: Path) -> dict[str, Any]:
    """Return credentials whose token comes from a command, as with cloud providers."""
    script = token.with_name("plugin.py")
    script.write_text(
        f"import json, pathlib\ntoken = pathlib.Path({str(token)!r}).read_text()\n"
        f"print(json.dumps({ISSUED!r} | {{'status': {{'token': token}}}}))\n"
    )
    return {"exec": {"apiVersion": ISSUED["apiVersion"], "command": sys.executable, "args": [str(script)]}}


@pytest.fixture(params=[by_file, by_command], ids=lambda way: way.__name__)
def kubeconfig(
    request: pytest.FixtureRequest, server: TokenServer, tmp_path: Path
) -> tuple[Kubernetes, Path]:
    """Return the settings, and the file from which the token comes."""
    way: Callable[[Path], dict[str, Any]] = request.param
    token = tmp_path / "token"
    token.write_text("first")
    path = write_kubeconfig(tmp_path, server=server.url, user=way(token))
    return Kubernetes(pool="p", kubeconfig=str(path)), token


async def test_a_token_that_was_replaced_is_read_anew_and_the_request_sent_again(
    server: TokenServer, kubeconfig: tuple[Kubernetes, Path]
) -> None:
    settings, token = kubeconfig
    api = await Api.connect(settings)
    try:
        await api.request("GET", "/api/v1/pods")
        server.token = "second"
        token.write_text("second")
        assert json.loads(await api.request("GET", "/api/v1/pods")) == {"items": []}
        async for line in api.watch("/api/v1/pods", query=(), idle_s=60.0):
            assert line in {b"", b'{"items": []}'}
        assert server.heard == ["first", "first", "second", "second"]
    finally:
        await api.close()


async def test_a_second_refusal_is_an_error(server: TokenServer, kubeconfig: tuple[Kubernetes, Path]) -> None:
    settings, token = kubeconfig
    api = await Api.connect(settings)
    server.token = "nobody has this one"
    try:
        for sent in (2, 3):
            with pytest.raises(ApiError, match="401") as refused:
                await api.request("GET", "/api/v1/pods")
            assert refused.value.status == 401
            assert len(server.heard) == sent
            token.write_text("other")
    finally:
        await api.close()
    assert set(server.heard) == {"first"}
