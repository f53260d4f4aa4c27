"""Real vLLM behind the real Envoy and picker. The picker's predictions agree with the servers' own counters
afterwards. The servers live as long as the run, so each test sends its own text.
"""

import asyncio
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.harness.processes import wait_until
from tests.vllm_env.gateway import CHAT, HITS, Routed, VllmGateway, running_vllm_gateway
from tests.vllm_env.prompts import prose
from tests.vllm_env.server import VllmServer

# The first test waits for the servers to start.
pytestmark = [pytest.mark.vllm, pytest.mark.envoy, pytest.mark.timeout(900)]

PREFIX_WORDS = 1230
"""A little over 2,000 tokens."""
RESPONSES = "/v1/responses"
MATCHED = "epp_matched_tokens_total"
Servers = tuple[VllmServer, VllmServer]


async def warm_up(gateway: VllmGateway, *, label: str) -> float:
    """Send ordinary requests until the picker has learned from their answers how many bytes make a token."""
    before = await bytes_per_token(gateway)
    for batch in range(10):
        prompts = [prose(f"{label} {batch} {n}", words=600) for n in range(4)]
        await asyncio.gather(*(gateway.complete(prompt) for prompt in prompts))

    async def learned() -> bool:
        return await bytes_per_token(gateway) != before

    await wait_until(learned, what="bytes per token are learned")
    return await bytes_per_token(gateway)


async def bytes_per_token(gateway: VllmGateway) -> float:
    """Return the value that the picker's table uses: its bound in bytes, divided by the server's in
    tokens.
    """
    endpoint = await gateway.endpoint(gateway.servers[0].name)
    return float(endpoint["table_capacity_bytes"] / endpoint["capacity_tokens"])


async def ask_after(gateway: VllmGateway, prefix: str, question: str, *, chat: bool, stream: bool) -> Routed:
    if not chat:
        return await gateway.complete(prefix + question, stream=stream)
    messages = [{"role": "system", "content": prefix}, {"role": "user", "content": question}]
    return await gateway.route(CHAT, messages=messages, stream=stream)


def chosen(answers: Sequence[Routed]) -> set[str]:
    return {answer.decision["chosen"] for answer in answers}


def error(estimated: float, real: float) -> float:
    return (estimated - real) / real


def shown(share: float) -> str:
    return f"{100 * share:+.1f} %"


async def test_a_repeated_prefix_keeps_to_one_server_with_the_predicted_hits(
    tmp_path: Path, vllm_servers: Servers
) -> None:
    policy = {"sampling": {"share": 1.0}}
    async with running_vllm_gateway(tmp_path, vllm_servers, policy=policy) as gateway:
        learned = await warm_up(gateway, label="warm-up")
        prefixes = [prose(f"tenant {n}", words=PREFIX_WORDS) for n in range(5)]
        hits, matched = await gateway.counted(HITS), await gateway.picker.metric(MATCHED)
        answers: list[list[Routed]] = [[] for _ in prefixes]
        for turn in range(10):
            suffix = prose(f"question {turn}", words=20)
            asked = (
                ask_after(gateway, prefix, suffix, chat=n % 2 == 1, stream=(n + turn) % 2 == 0)
                for n, prefix in enumerate(prefixes)
            )
            for row, answer in zip(answers, await asyncio.gather(*asked), strict=True):
                row.append(answer)
        hits = await gateway.counted(HITS) - hits
        matched = await gateway.picker.metric(MATCHED) - matched

        later = [answer for row in answers for answer in row[1:]]
        off = [error(a.predicted_tokens, a.cached_tokens) for a in later]
        sizes = [error(a.decision["prompt_tokens"], a.prompt_tokens) for a in later]
        print(f"50 requests: predicted {matched:.0f}, hits {hits:.0f} tokens: {shown(error(matched, hits))}")
        print(
            f"single requests: hits {shown(min(off))} to {shown(max(off))}, prompt {shown(min(sizes))} to {shown(max(sizes))}"
        )
        print(f"{learned:.3f} bytes a token learned; {later[0].prompt_tokens} tokens in the first prompt")
        assert all(len(chosen(row)) == 1 for row in answers)
        assert all(a.decision["served"] == gateway.server(a.decision["chosen"]).address for a in later)
        assert matched == sum(a.predicted_tokens for row in answers for a in row)
        assert min(a.cached_tokens for a in later) >= 2000
        assert abs(error(matched, hits)) <= 0.05


async def test_adapters_and_salts_share_no_prefix_and_keep_to_their_server(
    tmp_path: Path, vllm_servers: Servers
) -> None:
    async with running_vllm_gateway(tmp_path, vllm_servers) as gateway:
        prompt = prose("common to adapters and salts", words=PREFIX_WORDS)
        worlds: list[dict[str, Any]] = [
            {"model": "alpha"},
            {"model": "beta"},
            {"cache_salt": "tenant-1"},
            {"cache_salt": "tenant-2"},
            {},
        ]
        hits = await gateway.counted(HITS)
        first = [await gateway.complete(prompt, **world) for world in worlds]
        assert [answer.predicted_anywhere() for answer in first] == [0] * 5
        assert [answer.cached_tokens for answer in first] == [0] * 5
        assert await gateway.counted(HITS) == hits

        again = [await gateway.complete(prompt, **world) for world in worlds]
        assert [a.decision["chosen"] for a in again] == [a.decision["chosen"] for a in first]
        assert all(a.predicted_tokens > 1500 and a.cached_tokens > 1500 for a in again)
        assert await gateway.counted(HITS) - hits == sum(a.cached_tokens for a in again)

        for n, adapter in enumerate(("alpha", "beta")):
            # One after another, because a queue that is longer than a load is a reason to load the adapter on
            # another server too.
            others = [
                await gateway.complete(prose(f"{adapter} {m}", words=100), model=adapter) for m in range(4)
            ]
            assert chosen(others) == {first[n].decision["chosen"]}
            assert {a.decision["reason"] for a in others} == {"lora"}
        print(
            f"first {[a.cached_tokens for a in first]}, again {[a.cached_tokens for a in again]} tokens hit"
        )


async def test_each_follow_up_finds_its_response(tmp_path: Path, vllm_servers: Servers) -> None:
    policy = {"rule": "round-robin"}  # the prefix does not lead to the server by itself
    async with running_vllm_gateway(tmp_path, vllm_servers, policy=policy) as gateway:

        async def respond(text: str, **fields: Any) -> tuple[str, Mapping[str, Any]]:
            request_id, reply = await gateway.ask(
                RESPONSES, input=text, max_tokens=None, max_output_tokens=4, **fields
            )
            assert reply.status == 200, reply.body
            found = re.search(rb'"id": ?"(resp_[^"]+)"', reply.body)
            assert found, reply.body
            return found[1].decode(), await gateway.closed_decision(request_id)

        firsts = await asyncio.gather(*(respond(f"question {n}", stream=n % 2 == 0) for n in range(24)))
        assert {made["chosen"] for _, made in firsts} == {server.name for server in gateway.servers}
        seconds = await asyncio.gather(
            *(
                respond("and then?", previous_response_id=name, stream=n % 3 == 0)
                for n, (name, _) in enumerate(firsts)
            )
        )
        assert [made["chosen"] for _, made in seconds] == [made["chosen"] for _, made in firsts]
        read = [made for made in firsts + seconds if made[1]["reason"] != "overload"]  # then no id is read
        kept = [await gateway.client.request("GET", f"{RESPONSES}/{name}") for name, _ in read]
        assert {reply.status for reply in kept} == {200}, [*zip(read, kept, strict=True)]
