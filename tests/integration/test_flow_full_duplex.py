"""Flow control holds a request whose whole body is at the picker: full duplex through the real Envoy, for
longer than Envoy waits for a picker.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import pytest

from epp.base.types import Address
from epp.config.listening import Listen
from epp.picker.gate import Gate
from epp.protocol.stream_settings import StreamSettings
from epp.transport.server import ExtProcServer
from tests.harness.extproc_rig import (
    MAX_BODY_BYTES,
    EnvoyRig,
    bootstrap,
    running_envoy,
    running_upstreams,
)
from tests.harness.ports import free_port
from tests.harness.processes import wait_until
from tests.harness.seen import Seen
from tests.harness.slow_server import picker_of_slow_server, say_running
from tests.integration.test_extproc_envoy import long_completion, post

pytestmark = pytest.mark.envoy
PATIENCE_S = 3.0
"""How long Envoy waits for the picker in this rig."""


@pytest.mark.parametrize("mode", ["full_duplex", "full_duplex_request"])
async def test_a_body_that_waits_at_the_picker_reaches_the_server_untouched(
    tmp_path: Path, mode: str
) -> None:
    async with running_upstreams(1) as upstreams:
        picker = picker_of_slow_server(Address("127.0.0.1", upstreams[0]))
        seen = Seen.of(picker)
        gate = Gate(picker)
        server = ExtProcServer(
            picker,
            listen=Listen(address="127.0.0.1:0"),
            settings=StreamSettings(max_body_bytes=MAX_BODY_BYTES),
            gate=gate,
        )
        await server.start()
        ports = {mode: free_port()}
        config = bootstrap(ports, upstreams, server.port)
        async with running_envoy(config, tmp_path, port=ports[mode]), aiohttp.ClientSession() as client:
            rig = EnvoyRig(ports, upstreams, server, picker, seen, client)
            hanging = asyncio.create_task(
                client.post(rig.url(mode, "/hang"), data=long_completion(4000, tag="a"))
            )
            await wait_until(lambda: len(seen.picks) == 1, what="the first request keeps the server busy")
            say_running(picker, 1)
            body = long_completion(150_000, tag="b")
            task = asyncio.create_task(post(rig, mode, body))
            await wait_until(lambda: gate.waiting == 1, what="the second request waits")
            await asyncio.sleep(1.3 * PATIENCE_S)  # The test is that nothing happens in this time.
            assert not task.done()
            await asyncio.sleep(0.01)
            say_running(picker, 0)
            told = await task
            assert (told["size"], told["sum"]) == (len(body), sum(body))
            assert told["port"] == upstreams[0]
            assert seen.picks[-1].decision.waited_s > PATIENCE_S
            hanging.cancel()
            await asyncio.gather(hanging, return_exceptions=True)
            await rig.settled()
            server.check_integrity()
            gate.check_integrity()
            assert seen.faults == []
        await server.stop()
