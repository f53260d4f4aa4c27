"""Workers of one machine share over a local socket, without Redis."""

import functools
import os
import signal
from pathlib import Path

import pytest

from epp.config.sharing import Sharing
from epp.sources.sharing.hub import Hub, HubLink
from tests.harness.gateway import PickerProcess, running_gateway
from tests.harness.processes import wait_until
from tests.harness.sharing import both_ways, met, sharing
from tests.unit.picker.picker_questions import text

SETTINGS = Sharing(flush_interval_seconds=0.02)


async def test_a_worker_goes_on_without_the_hub_and_shares_when_it_is_back(tmp_path: Path) -> None:
    path = tmp_path / "hub.sock"
    hub = Hub(path)
    hub.start()
    async with (
        sharing(HubLink(path), settings=SETTINGS) as one,
        sharing(HubLink(path), settings=SETTINGS) as other,
    ):
        await met(one, other)
        await hub.close()
        path.unlink(missing_ok=True)
        await wait_until(
            lambda: not one.service.connected, what="the worker notices that the hub is gone", timeout_s=60
        )
        one.serve(text("meanwhile"))
        hub = Hub(path)
        hub.start()
        await met(one, other)
        await both_ways(one, other, name="after")
        await other.learns(text("meanwhile"))
    await hub.close()


@pytest.mark.core
@pytest.mark.envoy
async def test_two_workers_hit_as_one_does_and_one_that_was_killed_starts_warm(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, workers=2) as gateway:
        picker, client = gateway.picker, gateway.client

        async def met_again() -> bool:
            return await picker.ready() and await picker.metric("epp_sharing_peers") == 2

        await wait_until(met_again, what="the workers have met", timeout_s=60)
        for turn in range(4):
            await picker.reads_bodies()
            for user in range(12):
                prompt = text(f"user {user}", 4000).decode() + "".join(
                    text(f"{user} {n}", 600).decode() for n in range(turn)
                )
                assert (await client.complete(prompt)).status == 200
            await wait_until(
                functools.partial(_all_heard, picker),
                what="each worker has heard of the requests of the other",
                timeout_s=60,
            )
        asked = await picker.metric("epp_prompt_tokens_total")
        matched = await picker.metric("epp_matched_tokens_total")
        assert matched / asked > 0.55, (
            "one picker reaches 0.69, two pickers that share nothing reach less than half"
        )

        victim = picker.worker_pids()[0]
        os.kill(victim, signal.SIGKILL)
        await wait_until(
            lambda: victim not in picker.worker_pids(), what="the killed worker is gone", timeout_s=60
        )
        await wait_until(met_again, what="the workers have met again", timeout_s=60)

        async def warm() -> bool:
            entries = await _entries(picker)
            return min(entries) >= 0.9 * max(entries) > 0

        await wait_until(warm, what="both workers have the table", timeout_s=60)


async def _entries(picker: PickerProcess) -> list[float]:
    """Return the number of entries in each worker's table."""
    lines = (await picker.metrics()).splitlines()
    return [float(line.split()[1]) for line in lines if line.startswith("epp_table_size_entries ")]


async def _all_heard(picker: PickerProcess) -> bool:
    """Return whether each worker has heard of all requests, so that their tables have the same size. A stored
    table counts as heard.
    """
    entries = await _entries(picker)
    return min(entries) == max(entries) > 0
