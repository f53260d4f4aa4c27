"""Hostile values in Redis cannot end a picker. A running `epp serve` gets all of them and goes on serving."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import redis.asyncio as aredis

from epp.config.policy import DEFAULT_POLICY
from epp.picker.prefix_index.secret import derived
from epp.picker.server_caches import Roots
from epp.sources.sharing.batches import FORMAT
from tests.harness.backend import Backend, running_backend
from tests.harness.gateway import PickerProcess, config_in, running_picker, write_endpoints, write_policy
from tests.harness.redis_server import RedisServer, running_redis

SECRET = b"of the pickers in these tests"
DEEP = b"\x91" * 5_000
"""In msgpack: arrays of one element, each inside the one before it."""


def channel() -> str:
    roots = Roots(DEFAULT_POLICY.spec.chunks, secret=derived(SECRET).key)
    return f"prefix-gateway:{{default:{FORMAT}:{roots.fingerprint}}}"


@asynccontextmanager
async def picker_on(directory: Path, backend: Backend, redis: RedisServer) -> AsyncIterator[PickerProcess]:
    (directory / "hash-secret").write_bytes(SECRET)
    config = config_in(
        directory,
        hashSecretFile=str(directory / "hash-secret"),
        sharing={"redis": {"url": redis.url}},
        policyFile=str(directory / "policy.yaml"),
    )
    write_policy(config, {})
    write_endpoints(config, [backend])
    async with running_picker(config, directory=directory) as picker:
        yield picker


async def test_invalid_values_in_redis_end_no_running_and_no_starting_picker(tmp_path: Path) -> None:
    async with (
        running_redis(tmp_path) as redis,
        running_backend("s0") as backend,
        aredis.Redis(port=redis.port, protocol=2) as client,
    ):
        stream, name = f"{channel()}:stream", "epp_sharing_skipped_events_total"
        junks = DEEP, b"", b"\xff" * 100
        for junk in junks:
            await client.xadd(stream, {b"b": junk})
        async with picker_on(tmp_path, backend, redis) as picker:
            await picker.wait_metric(name, at_least=1, reason="malformed")
            before = await picker.metric(name, reason="malformed")
            for junk in junks:
                await client.xadd(stream, {b"b": junk})
            await picker.wait_metric(name, at_least=before + len(junks), reason="malformed")
            page = await picker.metrics()
            for count in ("source_failures", "probes", "log_lines_left_out"):
                assert f"epp_{count}_total{{" in page
            assert await picker.metric("epp_source_failures_total") == 0
            assert await picker.process.terminate() == 0


async def test_a_huge_value_in_redis_is_not_read_and_the_picker_goes_on(tmp_path: Path) -> None:
    """Redis accepts entries of 512 MB."""
    async with (
        running_redis(tmp_path) as redis,
        running_backend("s0") as backend,
        aredis.Redis(port=redis.port, protocol=2) as client,
        picker_on(tmp_path, backend, redis) as picker,
    ):
        await picker.wait_metric("epp_sharing_connected", at_least=1)
        await client.xadd(f"{channel()}:stream", {b"b": b"x" * 100_000_000})
        await picker.wait_metric("epp_sharing_errors_total", at_least=1, reason="refused")
        status = Path(f"/proc/{picker.process.pid}/status").read_text().split()
        # The reader's buffer of the entry counts, whose size varies: 258,000 were seen on a busy machine.
        assert int(status[status.index("VmHWM:") + 1]) < 320_000, "kB"
        await picker.wait_metric("epp_sharing_connected", at_least=1)
        refused = await picker.metric("epp_sharing_errors_total", reason="refused")
        await client.xadd(f"{channel()}:stream", {b"%d" % n: b"" for n in range(300_000)})
        await picker.wait_metric("epp_sharing_errors_total", at_least=refused + 1, reason="refused")
        await picker.wait_metric("epp_sharing_connected", at_least=1)
