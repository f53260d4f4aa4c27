"""Measures the picker's CPU for each request in two cases: each request has a new connection, or all requests
share one connection.

`python -m bench.bench_connections`. The client acts as a gateway that asks only for the pick, as NGINX
Gateway Fabric does: it sends headers and one body of 1 KB, and closes the connection. Rounds of the two cases
alternate. The bench prints medians.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median
from typing import Any, Final

import grpc

from bench.dataplane.cpu import cpu_s
from epp.config.tls import Tls
from epp.conformance import dataplane
from tests.harness.certificate import write_tls
from tests.harness.gateway import PickerProcess, config_in, running_picker
from tests.harness.ports import free_port

ENDPOINTS: Final = "endpoints: [{name: a, address: '127.0.0.1:1'}, {name: b, address: '127.0.0.1:2'}]"
BODY: Final = json.dumps({"model": "m", "prompt": "the fox and the hen " * 50}).encode()
AT_ONCE: Final = 4


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.bench_connections", description=__doc__)
    parser.add_argument("--requests", type=int, default=300, help="requests in each round (default 300)")
    parser.add_argument("--rounds", type=int, default=5, help="number of rounds (default %(default)s)")
    parser.add_argument(
        "--cert", type=Path, help="PEM file of the certificate to use instead of the tests' own (P-256)"
    )
    parser.add_argument("--key", type=Path, help="PEM file of the certificate's key")
    args = parser.parse_args()
    print("| | one connection for all requests | one connection for each request |\n| --- | --- | --- |")
    for name in ("clear text", "TLS"):
        together, apart = asyncio.run(_measured(args, tls=name == "TLS"))
        print(f"| {name} | {together:.2f} ms | {apart:.2f} ms |")


async def _measured(args: argparse.Namespace, *, tls: bool) -> tuple[float, float]:
    """Return the milliseconds of the picker's CPU for each request: with one connection, and with a new one
    each.
    """
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "endpoints.yaml").write_text(ENDPOINTS)
        (folder / "policy.yaml").write_text(
            "{apiVersion: prefix-gateway.dev/v1alpha1, kind: PrefixRoutingPolicy, metadata: {name: calm}, "
            "spec: {scrape: {failuresToEject: 100}}}"
        )
        listen: dict[str, Any] = {"address": f"127.0.0.1:{free_port()}"}
        credentials = None
        if tls:
            files = write_tls(folder)
            if args.cert:
                files = Tls(cert_file=str(args.cert), key_file=str(args.key))
            listen["tls"] = {"certFile": files.cert_file, "keyFile": files.key_file}
            credentials = grpc.ssl_channel_credentials(Path(files.cert_file).read_bytes())
        config = config_in(
            folder,
            dialect="nginx",
            envoy={"edsFile": ""},
            listen=listen,
            policyFile=str(folder / "policy.yaml"),
        )
        picker = await stack.enter_async_context(running_picker(config, directory=folder))
        address = config.listen.address
        rounds: tuple[list[float], list[float]] = ([], [])
        for number in range(args.rounds + 1):
            for apart in (False, True):
                cost = await _round(picker, address, credentials, requests=args.requests, apart=apart)
                if number:
                    rounds[apart].append(cost)
    return median(rounds[False]), median(rounds[True])


async def _round(
    picker: PickerProcess, address: str, credentials: Any, *, requests: int, apart: bool
) -> float:
    before = cpu_s(picker.process.pid)
    shares = [requests // AT_ONCE] * AT_ONCE
    await asyncio.gather(*(_client(address, credentials, count, apart=apart) for count in shares))
    return 1000 * (cpu_s(picker.process.pid) - before) / sum(shares)


async def _client(address: str, credentials: Any, requests: int, *, apart: bool) -> None:
    left = requests
    while left:
        async with _channel(address, credentials) as channel:
            for _ in range(1 if apart else requests):
                async with dataplane.exchange(channel, mode=dataplane.BARE) as exchange:
                    await exchange.send(BODY)
                    assert exchange.destination
                left -= 1


def _channel(address: str, credentials: Any) -> grpc.aio.Channel:
    options: Sequence[tuple[str, Any]] = (
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.ssl_target_name_override", "localhost"),
    )
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=options[:1])
    return grpc.aio.secure_channel(address, credentials, options=options)


if __name__ == "__main__":
    main()
