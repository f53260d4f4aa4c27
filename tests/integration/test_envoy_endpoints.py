"""Envoy follows the endpoints file: endpoints are added and removed, the file is empty, the file is
broken.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from epp.serve.envoy.files import render_endpoints
from tests.harness.backend import running_backend
from tests.harness.envoy import MODEL_SERVERS
from tests.harness.gateway import EnvoyBench
from tests.harness.processes import wait_until

pytestmark = pytest.mark.envoy


async def test_a_new_endpoint_serves_once_it_is_written(bench: EnvoyBench) -> None:
    async with running_backend("new") as new:
        await bench.set_endpoints([*(b.address for b in bench.backends), new.address])
        bench.picker.always(new.address)
        assert (await bench.client.complete()).served_by == "new"


async def test_an_ipv6_endpoint_serves(bench: EnvoyBench) -> None:
    async with running_backend("six", host="::1") as six:
        await bench.set_endpoints([six.address])
        bench.picker.always(six.address)
        assert (await bench.client.complete()).served_by == "six"
        assert bench.picker.exchanges[-1].served == str(six.address)


async def test_a_removed_endpoint_finishes_its_running_answers(bench: EnvoyBench) -> None:
    removed, kept = bench.backends
    bench.picker.always(removed.address)
    removed.behaviour.before_last.shut()
    async with bench.client.stream() as answer:
        await bench.set_endpoints([kept.address])
        assert (await bench.client.complete()).served_by == "s1", "the pick names an endpoint that is gone"
        removed.behaviour.before_last.open()
        assert b"[DONE]" in await answer.rest()


async def test_a_broken_file_changes_no_endpoint(bench: EnvoyBench) -> None:
    path = Path(bench.config.envoy.eds_file)
    broken = path.with_suffix(".broken")
    broken.write_bytes(render_endpoints([])[:40])
    rejected = f"{MODEL_SERVERS}update_failure"
    before = await bench.envoy.stat(rejected) + await bench.envoy.stat(f"{MODEL_SERVERS}update_rejected")
    broken.replace(path)

    async def noticed() -> bool:
        after = await bench.envoy.stat(rejected) + await bench.envoy.stat(f"{MODEL_SERVERS}update_rejected")
        return after > before

    await wait_until(noticed, what="Envoy refuses the file")
    assert await bench.envoy.endpoints() == {str(b.address) for b in bench.backends}
    assert (await bench.client.complete()).status == 200
    await bench.set_endpoints([bench.backends[0].address])
