"""Check any endpoint picker at a given address: `python -m epp.tools.conformance --picker IP:PORT ...`.

The tool calls only the picker, as the named gateway would. It never contacts the endpoints. The exit status
is 0 if every check passed, and 1 if a check failed.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, Literal

import grpc

from epp.base.types import Address
from epp.config.dialects import DIALECTS, DialectName
from epp.tools.conformance.checks import CHECKS, Check, NotAskedError, PickerUnderTest

_LONGEST_CHECK_S: Final = 60.0
CheckOutcome = Literal["pass", "fail", "not asked"]
_WIDTH: Final = 76


@dataclass(frozen=True, slots=True)
class CheckResult:
    dialect: DialectName
    row: int
    claim: str
    outcome: CheckOutcome
    detail: str = ""
    """The error, or the reason why the check was not made."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m epp.tools.conformance",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--picker", required=True, metavar="IP:PORT", help="address of the picker; unix:/path for a socket"
    )
    parser.add_argument(
        "--endpoints",
        required=True,
        metavar="IP:PORT,IP:PORT",
        help="all endpoints that the picker may choose from, at least two, ready and idle",
    )
    parser.add_argument(
        "--dialect", choices=[*DIALECTS, "all"], default="all", help="the gateway to play; all is the default"
    )
    parser.add_argument(
        "--model",
        default="",
        metavar="NAME",
        help="a model that all endpoints have; the picker knows the models of every endpoint",
    )
    parser.add_argument(
        "--alias",
        default="",
        metavar="NAME=MODEL",
        help="an alias: the picker replaces NAME by MODEL in the requests that it sends on",
    )
    parser.add_argument(
        "--prefillers",
        default="",
        metavar="IP:PORT,IP:PORT",
        help="endpoints that compute prompts for the others; leave them out of --endpoints",
    )
    parser.add_argument(
        "--ca", type=Path, metavar="FILE", help="PEM; the picker speaks TLS with a certificate of this CA"
    )
    parser.add_argument(
        "--cert",
        type=Path,
        metavar="FILE",
        help="PEM; the certificate of this tool, for a picker that asks for a certificate",
    )
    parser.add_argument("--key", type=Path, metavar="FILE", help="PEM; the key of --cert")
    parser.add_argument(
        "--server-name", default="", metavar="NAME", help="the name in the picker's certificate"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    endpoints = _addresses(parser, "--endpoints", args.endpoints)
    prefillers = _addresses(parser, "--prefillers", args.prefillers)
    name, _, target = args.alias.partition("=")
    if args.alias and not (name and target):
        parser.error("--alias: write it as NAME=MODEL")
    if len(endpoints) < 2:
        parser.error("--endpoints: name at least two")
    names: list[DialectName] = [name for name in DIALECTS if args.dialect in (name, "all")]  # type: ignore[misc]  # its keys
    target_of = partial(
        PickerUnderTest,
        endpoints=endpoints,
        model=args.model or "m",
        knows_models=bool(args.model),
        alias=(name, target) if args.alias else None,
        prefillers=prefillers,
    )
    results = asyncio.run(_run(args, names, target_of))
    try:
        print(table(results), flush=True)
    except BrokenPipeError:  # a reader such as `head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1 if any(result.outcome == "fail" for result in results) else 0


def _addresses(parser: argparse.ArgumentParser, flag: str, text: str) -> list[str]:
    found = [part.strip() for part in text.split(",") if part.strip()]
    try:
        for each in found:
            Address.parse(each)
    except ValueError as error:
        parser.error(f"{flag}: {error}")
    return found


async def _run(
    args: argparse.Namespace, names: Sequence[DialectName], target_of: Callable[..., PickerUnderTest]
) -> list[CheckResult]:
    async with _channel(args) as channel:
        return [result for name in names for result in await run(target_of(channel=channel, dialect=name))]


async def run(target: PickerUnderTest) -> list[CheckResult]:
    """Run every check, one after the other. The order of the checks does not matter."""
    return sorted([await _checked(check, target) for check in CHECKS], key=lambda result: result.row)


async def _checked(check: Check, target: PickerUnderTest) -> CheckResult:
    outcome: CheckOutcome = "fail"
    detail = ""
    try:
        async with asyncio.timeout(_LONGEST_CHECK_S):
            await check.run(target)
        outcome = "pass"
    except NotAskedError as error:
        outcome, detail = "not asked", str(error)
    except AssertionError as error:
        detail = str(error)
    except grpc.aio.AioRpcError as error:
        detail = f"the stream ended with {error.code().name}: {error.details()}"
    except TimeoutError:
        detail = "no answer in time"
    return CheckResult(target.dialect, check.row, check.claim, outcome, detail)


def table(results: Sequence[CheckResult]) -> str:
    """Return one line for each check, the details of the failures, and the totals."""
    lines = []
    for result in results:
        lines.append(f"{result.dialect:<14} row {result.row:>2}  {result.claim:<{_WIDTH}} {result.outcome}")
        if result.outcome == "fail":
            lines.append(f"{'':<14}         {result.detail}")
    counts = {
        outcome: sum(r.outcome == outcome for r in results) for outcome in ("pass", "fail", "not asked")
    }
    return "\n".join([*lines, ", ".join(f"{count} {outcome}" for outcome, count in counts.items())])


@asynccontextmanager
async def _channel(args: argparse.Namespace) -> AsyncIterator[grpc.aio.Channel]:
    if args.ca is None:
        async with grpc.aio.insecure_channel(args.picker) as channel:
            yield channel
        return
    pair = (args.key.read_bytes(), args.cert.read_bytes()) if args.cert and args.key else (None, None)
    credentials = grpc.ssl_channel_credentials(args.ca.read_bytes(), *pair)
    options = [("grpc.ssl_target_name_override", args.server_name)] if args.server_name else None
    async with grpc.aio.secure_channel(args.picker, credentials, options=options) as channel:
        yield channel


if __name__ == "__main__":
    sys.exit(main())
