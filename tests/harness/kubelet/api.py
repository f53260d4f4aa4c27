"""The part of the Kubernetes API that a node needs: single objects, and lists that are followed.

Invariant of `follow`: its results are level-based. After any failure it lists again, and the whole list
replaces what was known. It never gives up, however long the API server is away.
"""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, Final

import aiohttp

JsonObject = dict[str, Any]

_RETRY_S: Final = 1.0
_WATCH_S: Final = 300
_TIMEOUT: Final = aiohttp.ClientTimeout(total=15)


class ApiError(Exception):
    """The API server refused the request, or could not be reached (status 0)."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status


class Api:
    """One user of one API server, from a kubeconfig written by `tests.cluster_env`."""

    def __init__(self, kubeconfig: Path) -> None:
        document = json.loads(kubeconfig.read_text())
        cluster, user = document["clusters"][0]["cluster"], document["users"][0]["user"]
        headers = [("Authorization", f"Bearer {user['token']}")]
        if "as" in user:
            headers += [("Impersonate-User", user["as"])]
            headers += [("Impersonate-Group", group) for group in user["as-groups"]]
        self.url: Final[str] = cluster["server"]
        self._session = aiohttp.ClientSession(
            base_url=self.url,
            headers=headers,
            connector=aiohttp.TCPConnector(
                ssl=ssl.create_default_context(cafile=cluster["certificate-authority"]), limit=0
            ),
        )

    async def close(self) -> None:
        await self._session.close()

    async def get(self, path: str, **params: str) -> JsonObject:
        return await self._call("GET", path, params=params)

    async def create(self, path: str, document: Mapping[str, Any]) -> JsonObject:
        return await self._call("POST", path, document)

    async def merge(self, path: str, document: Mapping[str, Any]) -> JsonObject:
        """Apply a JSON merge patch."""
        return await self._call("PATCH", path, document, kind="application/merge-patch+json")

    async def delete(self, path: str, options: Mapping[str, Any]) -> None:
        await self._call("DELETE", path, options)

    async def follow(self, path: str, **params: str) -> AsyncIterator[dict[str, JsonObject]]:
        """Yield all objects by uid, at once and again after each change."""
        while True:
            try:
                listed = await self.get(path, **params)
                known = {item["metadata"]["uid"]: item for item in listed.get("items") or []}
                yield dict(known)
                async for event in self._watch(path, listed["metadata"]["resourceVersion"], params):
                    if event["type"] == "ERROR":
                        break
                    changed = event["object"]
                    if event["type"] == "BOOKMARK":
                        continue
                    if event["type"] == "DELETED":
                        known.pop(changed["metadata"]["uid"], None)
                    else:
                        known[changed["metadata"]["uid"]] = changed
                    yield dict(known)
            except (ApiError, aiohttp.ClientError, TimeoutError, OSError, ValueError):
                await asyncio.sleep(_RETRY_S)

    async def _watch(self, path: str, version: str, params: Mapping[str, str]) -> AsyncIterator[JsonObject]:
        query = {**params, "watch": "1", "resourceVersion": version, "timeoutSeconds": str(_WATCH_S)}
        # A connection may be silent without end, and a server may stop slowly. So both waits have a limit.
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=_WATCH_S + 30)
        async with self._session.get(path, params=query, timeout=timeout) as response:
            if response.status != 200:
                raise ApiError(response.status, await response.text())
            buffer = b""
            async for chunk in response.content.iter_any():
                *lines, buffer = (buffer + chunk).split(b"\n")
                for line in lines:
                    event: JsonObject = json.loads(line)
                    yield event

    async def _call(
        self,
        method: str,
        path: str,
        document: Mapping[str, Any] | None = None,
        *,
        kind: str = "application/json",
        params: Mapping[str, str] | None = None,
    ) -> JsonObject:
        body = json.dumps(document).encode() if document is not None else None
        headers = {"Content-Type": kind, "Accept": "application/json"}
        try:
            async with self._session.request(
                method, path, data=body, headers=headers, params=params, timeout=_TIMEOUT
            ) as response:
                answer = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ApiError(0, repr(error)) from error
        if response.status >= 400:
            raise ApiError(response.status, answer.decode(errors="replace")[:2000])
        value: JsonObject = json.loads(answer)
        return value
