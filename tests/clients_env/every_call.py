"""Sends every call of the `openai` client to a server, and prints the outcome and the parameters of each as a
JSON object on the last line. The calls are found in the client itself: none can be forgotten, and a newer
client brings its new ones. It runs in the environment of clients, not in ours.

    python every_call.py URL MODEL
"""

from __future__ import annotations

import asyncio
import inspect
import json
import ssl
import sys
from collections.abc import Iterator
from functools import cached_property
from typing import Any

PATIENCE_S = 60
UPLOAD = ("a.txt", b"Hello")
NEEDED: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Hello"}],
    "files": [UPLOAD],
    **dict.fromkeys(("file", "image", "video", "recording", "data"), UPLOAD),
}
"""What the parameters that a call needs get by name. All others get a text."""
UNSENT = (TypeError, ValueError, AttributeError, ssl.SSLError)
"""What the client itself raises for its arguments, and where it takes TLS only."""


def calls(resource: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each method of the client's resources by its name."""
    for key in dir(type(resource)):
        part = getattr(type(resource), key)
        if key.startswith(("_", "with_")):
            continue
        if isinstance(part, cached_property):
            yield from calls(getattr(resource, key), f"{name}{key}.")
        elif name and inspect.isfunction(part):
            yield f"{name}{key}", getattr(resource, key)


async def send(call: Any, model: str) -> None:
    """Send the call, and read what it streams."""
    parameters = inspect.signature(call).parameters.values()
    named = [one for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    always = {"model": model, "input": "Hello"}
    given = {one.name: NEEDED.get(one.name, "x") for one in named if one.default is one.empty}
    result = call(**given | {one.name: always[one.name] for one in named if one.name in always})
    if inspect.isawaitable(result):
        result = await result
    if hasattr(result, "__aenter__"):
        async with result as opened:
            [each async for each in opened]


async def outcome(call: Any, model: str) -> str:
    """Return `answered`, `refused` if the server says so in OpenAI's shape, `not sent` if the client itself
    refuses the arguments, or what went wrong.
    """
    try:
        async with asyncio.timeout(PATIENCE_S):
            await send(call, model)
    except Exception as error:  # noqa: BLE001 - the client's own errors are the outcome
        response = getattr(error, "response", None)
        if response is None:
            return f"{'not sent' if isinstance(error, UNSENT) else 'no answer'}: {error!r}"
        # A refused websocket has the bytes of the answer, any other error the object in it.
        fault = getattr(error, "body", None) or json.loads(response.body)["error"]
        shaped = 400 <= response.status_code < 500 and {"message", "type"} <= fault.keys()
        return "refused" if shaped else f"{response.status_code}: {fault}"
    return "answered"


async def main(url: str, model: str) -> None:
    from openai import AsyncOpenAI  # noqa: PLC0415 - our own environment has no clients

    # It tries again as for everyone: a server may close an idle connection just when a request comes.
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", admin_api_key="none") as client:
        found = {
            name: [await outcome(call, model), *inspect.signature(call).parameters]
            for name, call in calls(client)
        }
    print(json.dumps(found))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
