"""The command `model-server lora-sync`: the flags, the loop, the status page, signals and exit codes."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import random
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from aiohttp import web

from model_server.pods.sync.client import AdapterServer
from model_server.pods.sync.sync import LoraSync


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--server",
        required=True,
        metavar="URL",
        help="address of the model server, for example http://127.0.0.1:8000",
    )
    parser.add_argument(
        "--file",
        type=Path,
        required=True,
        metavar="PATH",
        help="YAML file that lists the adapters: adapters: [{name: sql, path: /a/sql}]",
    )
    parser.add_argument(
        "--interval-s",
        type=float,
        default=5.0,
        metavar="S",
        help="time between two passes, in seconds (default %(default)s)",
    )
    parser.add_argument(
        "--prune", action="store_true", help="also unload adapters that this process did not load"
    )
    parser.add_argument(
        "--once",
        action="store_true",
        help="make one pass and end; the exit code is 0 if the server then has the adapters that the file lists",
    )
    parser.add_argument(
        "--status-port",
        type=int,
        metavar="PORT",
        help="port at which this process serves /status (JSON) and /ready",
    )
    parser.add_argument(
        "--status-host",
        default="127.0.0.1",
        metavar="HOST",
        help="address at which --status-port listens (default %(default)s)",
    )
    parser.add_argument(
        "--api-key-env",
        default="VLLM_API_KEY",
        metavar="NAME",
        help="environment variable that holds the server's API key, if the server asks for a key (default %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Run the command. Return 0 if a signal ended it, or with --once if the server is in sync with the file.
    Return 1 if with --once the server is not in sync, or the status port is taken. Return 2 for invalid
    flags.
    """
    if not args.interval_s > 0 or not args.server.startswith(("http://", "https://")):
        print("model-server: --server must be an http URL, and --interval-s above 0", file=sys.stderr)
        return 2
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", stream=sys.stderr)
    try:
        return asyncio.run(_run(args))
    except OSError as error:
        print(f"model-server: {error}", file=sys.stderr)
        return 1


async def _run(args: argparse.Namespace) -> int:
    async with AdapterServer(args.server, api_key=os.environ.get(args.api_key_env)) as server:
        rng = random.Random()
        sync = LoraSync(file=args.file, server=server, clock=time.monotonic, rng=rng, prune=args.prune)
        if args.once:
            await sync.sync()
            print(json.dumps(sync.status()))
            return 0 if sync.in_sync else 1
        if args.status_port is None:
            await _until_signal(sync, args.interval_s)
        else:
            async with status_page(sync, host=args.status_host, port=args.status_port) as port:
                print(f"status at http://{args.status_host}:{port}/status", flush=True)
                await _until_signal(sync, args.interval_s)
    return 0


async def _until_signal(sync: LoraSync, interval_s: float) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with asyncio.TaskGroup() as tasks:
        syncing = tasks.create_task(_keep(sync, interval_s), name="lora-sync")
        await stop.wait()
        syncing.cancel()


async def _keep(sync: LoraSync, interval_s: float) -> None:
    """Make passes. The time between two passes differs by up to a tenth, so that a fleet spreads."""
    while True:
        await sync.sync()
        await asyncio.sleep(interval_s * random.uniform(0.9, 1.1))


@asynccontextmanager
async def status_page(sync: LoraSync, *, host: str, port: int) -> AsyncIterator[int]:
    """Serve the page inside the block, and yield its port."""

    async def show(_: web.Request) -> web.Response:
        return web.json_response(sync.status())

    async def ready(_: web.Request) -> web.Response:
        return web.json_response({"in_sync": sync.in_sync}, status=200 if sync.in_sync else 503)

    app = web.Application()
    app.router.add_get("/status", show)
    app.router.add_get("/ready", ready)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        yield int(runner.addresses[0][1])
    finally:
        await runner.cleanup()
