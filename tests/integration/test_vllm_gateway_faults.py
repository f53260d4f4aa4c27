"""Real vLLM behind the real Envoy and picker: a server is killed under load and returns, and a picker
drains.
"""

from __future__ import annotations

import asyncio
import json
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import aiohttp
import pytest

from tests.harness.processes import wait_until
from tests.vllm_env.gateway import COMPLETIONS, Routed, VllmGateway, running_vllm_gateway
from tests.vllm_env.prompts import prose
from tests.vllm_env.server import MODEL_NAME, VllmServer

pytest_plugins = ["tests.vllm_env.fixtures"]
# The first test waits for the servers to start, and one test starts a server again.
pytestmark = [pytest.mark.vllm, pytest.mark.envoy, pytest.mark.timeout(900)]

ANSWER_TOKENS = 600
"""With 24 such answers at once each answer takes many seconds, so the test can act while most of them run."""
SCRAPE = {"intervalSeconds": 0.25, "failuresToEject": 3}
Figure = Callable[[str], None]
Servers = tuple[VllmServer, VllmServer]


@dataclass(slots=True, eq=False)
class ClientCall:
    """One request as its client sees it while it runs."""

    request_id: str
    stream: bool
    status: int | None = None
    """None: no response headers have come so far."""
    body: bytes = b""
    end: Literal["", "whole", "cut", "refused"] = ""
    """Empty: the request runs. "refused": it never got headers."""

    @property
    def complete(self) -> bool:
        if self.end != "whole" or self.status != 200:
            return False
        return self.body.endswith(b"data: [DONE]\n\n") if self.stream else "choices" in json.loads(self.body)


class LongAnswers:
    """Clients ask for long answers, each about its own text. Two of four are streamed, in pairs: the picker
    takes turns between two idle servers, and each server should get both kinds.
    """

    def __init__(
        self,
        gateway: VllmGateway,
        *,
        label: str,
        plain_tokens: int = ANSWER_TOKENS,
        streamed_tokens: int = ANSWER_TOKENS,
    ) -> None:
        self.calls: list[ClientCall] = []
        self._gateway = gateway
        self._label = label
        self._plain_tokens = plain_tokens
        self._streamed_tokens = streamed_tokens
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, count: int) -> list[ClientCall]:
        """Start `count` more requests at once."""
        numbers = range(len(self.calls), len(self.calls) + count)
        new = [ClientCall(request_id=f"{self._label}-{n}", stream=n % 4 < 2) for n in numbers]
        self.calls += new
        self._tasks += [asyncio.create_task(self._run(call)) for call in new]
        return new

    async def finish(self) -> None:
        await asyncio.gather(*self._tasks)

    async def in_full_swing(self) -> None:
        """Wait until every streamed answer has begun and every other request has reached a server. On a slow
        machine the first requests may have ended by then. The test cannot change how long all of them take to
        begin.
        """
        streamed = [call for call in self.calls if call.stream]

        async def all_sent() -> bool:
            ended = sum(bool(call.end) for call in self.calls)
            shown = [await self._gateway.endpoint(server.name) for server in self._gateway.servers]
            return ended + sum(int(endpoint["in_flight"]) for endpoint in shown) >= len(self.calls)

        await wait_until(lambda: all(call.body for call in streamed), what="all streams began", timeout_s=60)
        await wait_until(all_sent, what="all requests have reached a server", timeout_s=60)

    async def _run(self, call: ClientCall) -> None:
        body: dict[str, Any] = {
            "model": MODEL_NAME,
            "prompt": prose(call.request_id, words=100),
            "max_tokens": self._streamed_tokens if call.stream else self._plain_tokens,
            "ignore_eos": True,
            "stream": call.stream,
        }
        headers = {"x-request-id": call.request_id}
        url = self._gateway.envoy.url + COMPLETIONS
        try:
            async with self._gateway.session.post(url, json=body, headers=headers) as response:
                call.status = response.status
                async for piece in response.content.iter_any():
                    call.body += piece
            call.end = "whole"
        except aiohttp.ClientError:
            call.end = "refused" if call.status is None else "cut"


async def test_a_server_killed_under_load_costs_no_request_whose_answer_had_not_begun(
    tmp_path: Path, vllm_servers: Servers, figure: Figure
) -> None:
    """The server is left out until it returns. The picker then believes that its cache is empty."""
    dead, other = vllm_servers
    async with running_vllm_gateway(tmp_path, vllm_servers, policy={"scrape": SCRAPE}) as gateway:
        known = await known_to(gateway, dead)
        load = LongAnswers(gateway, label="load")
        before = load.start(24)
        await load.in_full_swing()
        await asyncio.to_thread(dead.kill)
        after = load.start(12)
        await load.finish()

        decisions = {call: await gateway.closed_decision(call.request_id) for call in load.calls}
        on_dead = [call for call in before if decisions[call]["chosen"] == dead.name]
        # All answers of the killed server are from before it was killed.
        unbegun = [call for call in on_dead if not call.stream and decisions[call]["served"] != dead.address]
        cut = [call for call in load.calls if not call.complete]
        sent_to = Counter(decisions[call]["chosen"] for call in after)
        figure(
            f"24 in flight, {len(on_dead)} at the killed server, {len(unbegun)} of them without headers: "
            f"{sum(call.complete for call in unbegun)} answered by the other; {len(cut)} begun answers cut; "
            f"12 sent right after: {dict(sent_to)}, {sum(call.complete for call in after)} answered"
        )
        assert unbegun, "the killed server had nothing to lose"
        assert all(call.complete for call in unbegun)
        assert all(decisions[call]["served"] == other.address for call in unbegun)
        assert all(call.complete for call in after)
        assert {call.end for call in cut} == {"cut"}
        assert all(call.status == 200 and call.stream and call in on_dead for call in cut)
        assert await gateway.envoy.bypassed() == 0

        await gateway.wait_endpoint(dead.name, ready=False, what="the killed server is left out")
        answers = await asyncio.gather(
            *(gateway.complete(prose(f"without it {n}", words=50)) for n in range(12))
        )
        assert {answer.decision["chosen"] for answer in answers} == {other.name}
        assert (await gateway.endpoint(dead.name))["in_flight"] == 0

        believed = (await gateway.endpoint(dead.name))["table_entries"]
        assert believed > 0

        await asyncio.to_thread(restart, dead)
        await gateway.wait_endpoint(dead.name, ready=True, what="the restarted server is taken back")
        await gateway.wait_endpoint(
            dead.name, table_entries=0, what="the picker believes that its cache is empty"
        )
        again = await gateway.complete(known)
        shown = {c["name"]: c["matched_tokens"] for c in again.decision["candidates"]}
        assert shown[dead.name] == 0
        assert again.decision["chosen"] == other.name or again.cached_tokens == 0
        answers = await asyncio.gather(*(gateway.complete(prose(f"back {n}", words=50)) for n in range(24)))
        assert {answer.decision["served"] for answer in answers} == {dead.address, other.address}
        figure(
            f"returned: {believed} table entries dropped, {len(served_by(answers, dead))} of 24 new prompts served"
        )


async def known_to(gateway: VllmGateway, server: VllmServer) -> str:
    """Return a prompt that the picker knows the server to hold."""
    for n in range(100):
        prompt = prose(f"before the crash {n}", words=400)
        if (await gateway.complete(prompt)).decision["chosen"] == server.name:
            break
    again = await gateway.complete(prompt)
    assert again.decision["chosen"] == server.name
    assert again.predicted_tokens > 400
    return prompt


def served_by(answers: Sequence[Routed], server: VllmServer) -> list[Routed]:
    return [answer for answer in answers if answer.decision["served"] == server.address]


def restart(server: VllmServer) -> None:
    """Start another process at the same address, as a supervisor does."""
    server.start(port=server.port)
    server.wait_ready()


async def test_a_picker_that_drains_cuts_no_answer(
    tmp_path: Path, vllm_servers: Servers, figure: Figure
) -> None:
    """The picker waits for answers whose headers it has not seen yet. It leaves before the streamed answers
    have ended.
    """
    # The picker must also let go the answers that stream through it.
    policy = {"sampling": {"share": 1.0}}
    async with running_vllm_gateway(tmp_path, vllm_servers, policy=policy) as gateway:
        load = LongAnswers(gateway, label="drain", plain_tokens=200, streamed_tokens=900)
        before = load.start(16)
        await load.in_full_swing()
        gateway.picker.process.signal(signal.SIGTERM)
        after = load.start(8)
        status = await gateway.picker.process.wait(timeout_s=120)
        running = [call for call in before if not call.end]
        unpicked = [call for call in after if not call.end and not call.stream]
        await load.finish()
        figure(
            f"16 in flight at SIGTERM and 8 sent after it: {sum(call.complete for call in load.calls)} complete; "
            f"the picker left while {len(running)} of the 16 answers ran, all streamed"
        )
        assert status == 0
        assert all(call.complete for call in load.calls)
        assert running, "the picker waited for the streamed answers"
        assert all(call.stream for call in running)
        # Envoy sends a request on without a pick if it comes when the picker takes no more.
        assert len(unpicked) <= await gateway.envoy.bypassed()
        assert (await gateway.client.get("/v1/models")).status == 200
