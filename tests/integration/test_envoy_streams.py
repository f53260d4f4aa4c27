"""Bodies, answers, and the stream that Envoy holds at the picker, through the real Envoy on our bootstrap."""

import json
from pathlib import Path

import aiohttp
import pytest

from tests.harness.gateway import EnvoyBench, running_bootstrap
from tests.harness.processes import wait_until

pytestmark = pytest.mark.envoy

LIMIT_BYTES = 3 * 2**20


async def test_a_body_up_to_the_limit_passes_and_one_byte_more_does_not(tmp_path: Path) -> None:
    async with running_bootstrap(tmp_path, envoy={"maxBodyBytes": LIMIT_BYTES}) as bench:
        first, second = bench.backends
        first.behaviour.reset = True
        bench.picker.always(first.address, second.address)
        body = b"x" * LIMIT_BYTES
        reply = await bench.client.request("POST", "/v1/completions", body=body)
        assert (reply.status, reply.served_by) == (200, "s1"), "a retry sends the whole body again"
        assert second.prompts[0].body == body
        assert bench.picker.exchanges[0].body == body

        reply = await bench.client.request("POST", "/v1/completions", body=body + b"x")
        assert reply.status == 413
        assert reply.json()["error"]["type"] == "invalid_request_error"
        assert len(second.prompts) == 1


async def test_answers_that_servers_cut_are_counted_and_named(bench: EnvoyBench) -> None:
    cut = "http.gateway.downstream_rq_tx_reset"
    backend = bench.backends[0]
    bench.picker.always(backend.address)
    backend.behaviour.chunks = 3
    backend.behaviour.before_last.shut()
    async with bench.client.stream() as answer:
        await answer.piece()
        answer.abort()
    await wait_until(lambda: bench.picker.open_streams == 0, what="the first request is over")
    assert await bench.envoy.stat(cut) == 0
    async with bench.client.stream() as answer:
        await answer.piece()
        await backend.stop()
        with pytest.raises(aiohttp.ClientError):
            await answer.rest()
    await bench.envoy.wait_stat_is(cut, 1)
    await wait_until(lambda: len(bench.envoy.access_log()) == 2, what="both requests are in the log")
    entry = bench.envoy.access_log()[1]
    assert (entry["flags"] in ("UC", "UPE"), entry["served_by"]) == (True, str(backend.address))


async def test_the_access_log_says_who_was_picked_and_who_served(bench: EnvoyBench) -> None:
    first, second = bench.backends
    first.behaviour.fail_next = 1
    bench.picker.always(first.address, second.address)
    headers = {"x-request-id": "r-1", "content-type": "application/json"}
    await bench.client.request("POST", "/v1/completions?key=sk-secret", body=b"{}", headers=headers)
    await wait_until(lambda: bool(bench.envoy.access_log()), what="the entry is written")
    (entry,) = bench.envoy.access_log()
    assert entry["request_id"] == "r-1"
    assert entry["picked"] == f"{first.address},{second.address}"
    assert entry["served_by"] == str(second.address)
    assert (entry["attempts"], entry["status"], entry["path"]) == (2, 200, "/v1/completions")
    assert isinstance(entry["duration_ms"], int)
    assert "sk-secret" not in json.dumps(entry)
