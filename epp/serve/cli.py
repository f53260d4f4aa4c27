"""Runs the `epp` command: starts a gateway, serves, checks a configuration, writes the bootstrap of Envoy."""

import argparse
import asyncio
import contextlib
import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import NoReturn, get_args

import msgspec
import uvloop

from epp.base.errors import ConfigError
from epp.base.types import Address
from epp.config.policy import RuleName
from epp.config.settings import Config, load_config
from epp.observe.telemetry.logs import setup_logging
from epp.serve import preflight, process
from epp.serve.admin_commands import counts_text, fetch, record, table
from epp.serve.envoy.bootstrap import bootstrap
from epp.serve.envoy.files import write_first, write_if_changed
from epp.serve.process import Supervisor
from epp.serve.words import WordsParser, completion

_DESCRIPTION = """\
This endpoint picker for Envoy routes each LLM request to the model server that can answer soonest.
The picker counts what each server's prefix cache holds, which LoRA adapters the server has loaded,
and how many prompt tokens it still has to compute.
"""
_UP = "Run the picker and Envoy before model servers, without a cluster, until Ctrl-C ends both."
_EXPLAIN = "Ask a running picker why prompt tokens were not cached where they were sent, and what to change."
_RECORD = "Record the requests of a running picker for `epp replay`: sizes, times and hashes, but no text."
_REPLAY = "Run recorded requests through the picker on simulated servers, once for each policy, and compare."
_EXAMPLES = """\
the gateway in one command:
  epp up --server 10.0.0.1:8000 --server http://vllm-b:8000
with files of your own:
  config.yaml:     endpointsFile: endpoints.yaml
                   envoy: {edsFile: eds.json}
  endpoints.yaml:  endpoints: [{name: a, address: "10.0.0.1:8000"}]
  epp check --config config.yaml
  epp serve --config config.yaml &
  epp envoy-config --config config.yaml > envoy.yaml && envoy -c envoy.yaml --disable-hot-restart
"""


def command_line() -> WordsParser:
    parser = WordsParser(
        prog="epp",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"epp {version('prefix-gateway')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    parser.commands = commands.choices

    def add(name: str, text: str, example: str) -> argparse.ArgumentParser:
        shown = f"for example: epp {name} {example}"
        return commands.add_parser(name, help=text, description=text, epilog=shown)

    def add_configured(name: str, text: str) -> argparse.ArgumentParser:
        command = add(name, text, "--config config.yaml")
        command.add_argument(
            "--config", type=Path, required=True, metavar="FILE", help="configuration file (YAML)"
        )
        return command

    _add_up(add("up", _UP, "--server 10.0.0.1:8000 --server http://vllm-b:8000"))
    serve = add_configured(
        "serve", "Run the picker. On SIGTERM it lets the requests in flight end, then stops."
    )
    serve.add_argument("--worker", type=int, default=None, metavar="N", help=argparse.SUPPRESS)
    serve.add_argument("--hub", type=Path, default=None, metavar="PATH", help=argparse.SUPPRESS)
    check = add_configured("check", "Check the configuration, policy, endpoints, certificates and folders.")
    check.add_argument(
        "--verbose", action="store_true", help="print the configuration with all defaults, as YAML"
    )
    check.add_argument(
        "--json", action="store_true", help="print the configuration with all defaults, as JSON"
    )
    envoy = add_configured("envoy-config", "Print a complete Envoy bootstrap for this configuration.")
    envoy.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="write the bootstrap to this file instead of printing it; the file is replaced as a whole or not at all",
    )
    _add_explain(add("explain", _EXPLAIN, "--admin http://127.0.0.1:9090"))
    _add_record(add("record", _RECORD, "--for 600 monday.rec"))
    _add_replay(add("replay", _REPLAY, "monday.rec --rule least-cost round-robin"))
    add("completion", "Print a script that completes commands and options in bash.", "> epp.sh; . ./epp.sh")
    return parser


def _add_up(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--server",
        action="append",
        required=True,
        metavar="HOST:PORT",
        help="model server, by address, name or URL, once for each; the port is 8000 if none is named; names are looked up again every 5 s",
    )
    command.add_argument(
        "--port",
        type=_place,
        default="127.0.0.1:8080",
        metavar="PORT",
        help="address of the gateway: PORT for this machine alone, or IP:PORT, such as 0.0.0.0:8080 (default %(default)s)",
    )
    command.add_argument(
        "--page",
        type=_place,
        default="127.0.0.1:9090",
        metavar="PORT",
        help="address of the live page and the metrics: PORT or IP:PORT (default %(default)s)",
    )
    command.add_argument("address", nargs="?", type=_bare, help=argparse.SUPPRESS)
    command.add_argument(
        "--policy", type=Path, metavar="FILE", help="policy file; each change of it is put in use"
    )
    command.add_argument(
        "--tls",
        type=Path,
        nargs=2,
        metavar=("CERT", "KEY"),
        help="serve clients over TLS with these PEM files",
    )
    command.add_argument(
        "--write", type=Path, metavar="DIR", help="keep the files of picker and Envoy in DIR, for `epp serve`"
    )


def _bare(text: str) -> NoReturn:
    raise argparse.ArgumentTypeError(f"write --server {text}")


def _place(text: str) -> Address:
    try:
        return Address.parse(text if ":" in text else f"127.0.0.1:{text}")
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text}: write PORT or IP:PORT") from error


def _add_explain(command: argparse.ArgumentParser) -> None:
    _add_admin(command)
    command.add_argument(
        "--window",
        type=int,
        default=600,
        metavar="SECONDS",
        help="count the requests of the last SECONDS seconds, 900 at most (default 600)",
    )
    command.add_argument("--json", action="store_true", help="print JSON")


def _add_record(command: argparse.ArgumentParser) -> None:
    _add_admin(command)
    command.add_argument(
        "file",
        type=Path,
        metavar="FILE",
        help="file to write, which must not exist yet",
    )
    command.add_argument(
        "--for",
        dest="seconds",
        type=_positive,
        metavar="SECONDS",
        help="stop after SECONDS seconds (default: record until Ctrl-C)",
    )
    command.add_argument(
        "--max-bytes",
        type=int,
        default=2**28,
        metavar="N",
        help="stop when FILE has N bytes (default %(default)s)",
    )


def _add_admin(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--admin",
        default="http://127.0.0.1:9090",
        metavar="URL",
        help="admin address of the picker (default http://127.0.0.1:9090)",
    )


def _add_replay(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "recordings",
        nargs="+",
        type=Path,
        metavar="RECORDING",
        help="recording that `epp record` wrote",
    )
    command.add_argument(
        "--policy",
        nargs="+",
        type=Path,
        default=[],
        metavar="FILE",
        help="policy files to compare with the recorded policy",
    )
    command.add_argument(
        "--rule",
        nargs="+",
        choices=get_args(RuleName),
        default=[],
        metavar="RULE",
        help="rules to compare, each in the recorded policy: %(choices)s",
    )
    command.add_argument(
        "--load",
        type=_positive,
        default=1.0,
        metavar="X",
        help="multiply the rate of requests by X (default 1)",
    )
    command.add_argument(
        "--servers", type=_count, default=0, metavar="N", help="simulate N servers, not the recorded ones"
    )
    command.add_argument("--json", type=Path, metavar="FILE", help="write the table as JSON")


def _positive(text: str) -> float:
    if not 0 < float(text) < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: write a number above 0")
    return float(text)


def _count(text: str) -> int:
    _positive(text)
    return int(text)


def main(argv: list[str] | None = None) -> int:
    """Run a command. Return its exit status, which is 2 if the configuration cannot be used."""
    args = command_line().parse_args((sys.argv[1:] if argv is None else argv) or ["--help"])
    try:
        status = _run(args)
        if sys.stdout is not None:  # None: the program was started with standard output closed
            sys.stdout.flush()
    except ConfigError as error:
        print(f"epp: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # A reader such as `head` has seen enough. Python writes the rest when the process ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return status


def _run(args: argparse.Namespace) -> int:
    if args.command == "completion":
        print(completion(command_line()), end="")
        return 0
    if args.command == "explain":
        found = fetch(args.admin, window_s=args.window)
        print(msgspec.json.format(msgspec.json.encode(found)).decode() if args.json else table(found))
        return 0
    if args.command in (made := {"up": _up, "record": _record, "replay": _replay}):
        return made[args.command](args)
    config = load_config(args.config)
    if args.command == "envoy-config":
        text = bootstrap(config)
        with contextlib.suppress(OSError):  # the picker says which file it cannot write
            if Path(config.envoy.eds_file).absolute().parent.is_dir():
                write_first(config)
        return _hand_out(text, args.output)
    if args.command == "check":
        return _check(config, verbose=args.verbose, as_json=args.json)
    return _serve(config, args.config, worker=args.worker, hub=args.hub)


def _up(args: argparse.Namespace) -> int:
    from epp.serve import up  # noqa: PLC0415 - see `_serve`

    for flag, address in (("--port", args.port), ("--page", args.page)):
        if why := up.unusable(address):
            raise ConfigError(f"{flag} {address}: {why}; name another port, on an address of this machine")
    process.raise_file_limit()
    servers = [up.parsed(text) for text in args.server]
    where = {"listen": args.port, "page": args.page, "policy": args.policy, "write": args.write}
    return int(uvloop.run(up.up(servers, tls=args.tls or (), **where)))


def _record(args: argparse.Namespace) -> int:
    counts = record(args.file, admin=args.admin, max_bytes=args.max_bytes, seconds=args.seconds)
    print(counts_text(counts))
    if counts.requests:
        print(f"next: epp replay {args.file}")
    return 0


def _replay(args: argparse.Namespace) -> int:
    try:
        from epp.tools.replay.command import replay  # noqa: PLC0415 - simulated servers, which the picker's image does not hold
    except ModuleNotFoundError as error:
        raise ConfigError(
            "replay: this installation has no simulator; run `epp replay` where the whole project is installed"
        ) from error
    replay(
        args.recordings,
        policies=args.policy,
        rules=args.rule,
        load=args.load,
        servers=args.servers,
        json_file=args.json,
    )
    return 0


def _hand_out(text: str, file: Path | None) -> int:
    if file is None:
        print(text, end="")
        return 0
    try:
        write_if_changed(file, text.encode())
    except OSError as error:
        raise ConfigError(f"--output {file}: {error.strerror}; name a file that can be written") from error
    return 0


def _check(config: Config, *, verbose: bool, as_json: bool) -> int:
    """Print one line if all is well, or the configuration as it would run, with all defaults filled in."""
    from epp.serve.inputs import load_inputs  # noqa: PLC0415 - see `_serve`

    inputs = load_inputs(config)
    for remark in (*preflight.inspect(config), *preflight.contradictions(config, inputs.policy)):
        print(f"epp: {remark}", file=sys.stderr)
    listed = inputs.listed.endpoints
    if not listed and config.kubernetes is None:
        raise ConfigError(
            f"{config.endpoints_file}: endpoints: the list is empty, so every request would get 503; write one as "
            '{name: a, address: "10.0.0.1:8000"}'
        )
    if verbose or as_json:
        endpoints = [{"name": e.name, "address": str(e.address), "model": e.model} for e in listed]
        shown = {"config": config, "policy": inputs.policy, "endpoints": endpoints}
        print((msgspec.json if as_json else msgspec.yaml).encode(shown).decode().rstrip())
        return 0
    count = f"{len(listed)} endpoint{'s' * (len(listed) != 1)}"
    where = count if config.kubernetes is None else "endpoints from the cluster"
    print(
        f"OK: {where}, rule {inputs.policy.spec.rule}, picker on {config.listen.address}, gateway {preflight.named(config)}"
    )
    return 0


def _serve(config: Config, path: Path, *, worker: int | None, hub: Path | None) -> int:
    process.raise_file_limit()
    from epp.serve import app  # noqa: PLC0415 - it imports everything, which other commands need not wait for
    from epp.serve.inputs import load_inputs  # noqa: PLC0415 - as above

    if worker is None and config.workers > 1:
        setup_logging(config.log)
        load_inputs(config, tolerant=True)  # report a fault once, not once for each worker
        meet = config.sharing.redis is None
        return asyncio.run(Supervisor(config_path=path, count=config.workers, meet=meet).run())
    if worker is not None:
        process.follow_parent()
    served = app.App(config, worker=worker or 0, hub=hub)
    process.tune()
    return int(uvloop.run(served.run()))
