"""Sends requests to the API server over HTTP and reads its watches. Each failure is one typed error.

The `kubernetes` package (an extra) provides the access: service account or kubeconfig, certificates, tokens.
In a pod it reads renewed tokens by itself. The tokens of a kubeconfig, from a file or a command, are fetched
again when the server refuses the old ones. The models of the package are not used: other modules decode the
objects directly into the few fields that are needed. The package is imported only when a cluster is
configured, since it costs 20 MB and a third of a second. Called by `cluster`; `require` by `inputs` at start.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import os
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

import aiohttp
import msgspec
import yaml

from epp.base.errors import ConfigError
from epp.config.reading import read_file
from epp.config.sections import Kubernetes
from epp.sources.kube.objects import Failure

_SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_REQUEST_TIMEOUT_S: Final = 15.0
_RENEW_PAUSE_S: Final = 10.0
"""Least time between two attempts to get new credentials, since each may run a command."""
_MAX_LINE_BYTES: Final = 16 * 2**20
"""No object is larger, since etcd accepts 1.5 MB."""

Query = Sequence[tuple[str, str]]


class ApiError(Exception):
    """A request failed. `status` is 0 if no answer came."""

    def __init__(self, message: str, *, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


def require(settings: Kubernetes) -> None:
    """Check everything that needs no request. Raise ConfigError, which says what to install or to set."""
    if importlib.util.find_spec("kubernetes") is None:
        raise ConfigError(
            "kubernetes: needs the package `kubernetes`; install it with: pip install 'prefix-gateway[kubernetes]'"
        )
    if settings.kubeconfig:
        read_file(settings.kubeconfig, field="kubernetes.kubeconfig")
    elif "KUBERNETES_SERVICE_HOST" not in os.environ:
        raise ConfigError("kubernetes.kubeconfig: is missing; only a pod in a cluster works without it")
    namespace_of(settings)


def namespace_of(settings: Kubernetes) -> str:
    """Return the configured namespace, else the pod's own, else the one of the kubeconfig's current
    context.
    """
    if settings.namespace:
        return settings.namespace
    try:
        if not settings.kubeconfig:
            return (_SERVICE_ACCOUNT / "namespace").read_text().strip()
        document = yaml.safe_load(Path(settings.kubeconfig).read_text())
        current = document.get("current-context")
        contexts = {c["name"]: c["context"] for c in document.get("contexts", ())}
        return str(contexts.get(current, {}).get("namespace", "default"))
    except (OSError, yaml.YAMLError, AttributeError, KeyError, TypeError) as error:
        raise ConfigError(
            f"kubernetes.namespace: cannot find the namespace of this pod, so please set it: {error}"
        ) from error


class Api:
    """One connection to the API server. `connect` makes it, in the event loop that uses it."""

    def __init__(self, client: Any, *, renew: Callable[[], Awaitable[None]] | None = None) -> None:
        """`renew` gets new credentials. None means that the credentials renew themselves."""
        self._client = client
        """A `kubernetes.aio.client.ApiClient`: generated code, few of whose functions have types."""
        self._renew = renew
        self._renew_again_at = 0.0

    @classmethod
    async def connect(cls, settings: Kubernetes) -> Api:
        """Prepare a connection without sending anything. Raise ConfigError if there are no usable
        credentials.
        """
        client: Any = importlib.import_module("kubernetes.aio.client")
        config: Any = importlib.import_module("kubernetes.aio.config")
        configuration = client.Configuration()

        async def load() -> None:
            try:
                if settings.kubeconfig:
                    await config.load_kube_config(
                        config_file=settings.kubeconfig,
                        client_configuration=configuration,
                        persist_config=False,
                    )
                else:
                    config.load_incluster_config(client_configuration=configuration)
            except (config.ConfigException, OSError, yaml.YAMLError) as error:
                raise ConfigError(f"kubernetes: cannot connect to the cluster: {error}") from error

        await load()
        made = client.ApiClient(configuration)
        made.user_agent = "prefix-gateway-epp"
        return cls(made, renew=load if settings.kubeconfig else None)

    async def close(self) -> None:
        await self._client.close()

    async def request(self, method: str, path: str, *, query: Query = (), body: object = None) -> bytes:
        """Send one request and return the whole answer. Raises ApiError for anything but success. The body of
        a PATCH is a merge patch.
        """
        limits = aiohttp.ClientTimeout(total=_REQUEST_TIMEOUT_S)
        async with self._answer(method, path, query, limits, body) as response:
            return await response.read()

    async def watch(self, path: str, *, query: Query, idle_s: float) -> AsyncGenerator[bytes]:
        """Yield the lines of a watch until the server ends it. The first line is empty: the watch is open.

        Raises ApiError if the connection breaks, or is silent for `idle_s`.
        """
        limits = aiohttp.ClientTimeout(total=None, sock_connect=_REQUEST_TIMEOUT_S, sock_read=idle_s)
        async with self._answer("GET", path, query, limits) as response:
            yield b""
            async with aclosing(lines_of(response.content.iter_any())) as lines:
                async for line in lines:
                    yield line

    @asynccontextmanager
    async def _answer(
        self, method: str, path: str, query: Query, limits: aiohttp.ClientTimeout, body: object = None
    ) -> AsyncGenerator[aiohttp.ClientResponse]:
        """Send a request, and give the answer while it is read. The request is repeated only if its
        credentials had expired. Raises ApiError for anything but success.
        """
        try:
            response = await self._send(method, path, query, limits, body)
            if response.status == HTTPStatus.UNAUTHORIZED and await self._renewed(response):
                response = await self._send(method, path, query, limits, body)
            async with response:
                if response.status >= 300:
                    raise _refusal(response, await response.read())
                yield response
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            text = " ".join(str(error).split()) or "no answer in time"
            raise ApiError(f"{type(error).__name__}: {text}"[:500]) from error

    async def _send(
        self, method: str, path: str, query: Query, limits: aiohttp.ClientTimeout, body: object
    ) -> aiohttp.ClientResponse:
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        prepared = await self._client.param_serialize(
            method,
            path,
            query_params=list(query),
            header_params={"Accept": "application/json", "Content-Type": kind},
            body=body,
            auth_settings=["BearerToken"],
        )
        sent = await self._client.call_api(*prepared, _request_timeout=limits)
        response: aiohttp.ClientResponse = sent.response
        return response

    async def _renewed(self, refused: aiohttp.ClientResponse) -> bool:
        """Get new credentials, and return whether there may be some. If so, nobody reads the refusal."""
        now = asyncio.get_running_loop().time()
        if self._renew is None or now < self._renew_again_at:
            return False
        self._renew_again_at = now + _RENEW_PAUSE_S
        refused.release()
        try:
            await self._renew()
        except ConfigError as error:
            raise ApiError(str(error), status=HTTPStatus.UNAUTHORIZED) from error
        return True


async def lines_of(pieces: AsyncIterable[bytes]) -> AsyncGenerator[bytes]:
    """Yield whole lines, up to the length of the largest object. Raises ValueError for a longer line.

    The work is in proportion to the bytes, however many pieces a line comes in.
    """
    begun = bytearray()
    async for piece in pieces:
        begun += piece
        if len(begun) > _MAX_LINE_BYTES:
            raise ValueError(f"a line has more than {_MAX_LINE_BYTES} bytes")
        if b"\n" in piece:
            *whole, begun = begun.split(b"\n")
            for line in filter(None, whole):
                yield bytes(line)


def _refusal(response: aiohttp.ClientResponse, answer: bytes) -> ApiError:
    try:
        message = msgspec.json.decode(answer, type=Failure).message
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        message = ""  # This happens for the page of a proxy.
    text = f"HTTP {response.status} {response.reason}: {message or 'no reason given'}"
    return ApiError(text[:1000], status=response.status)
