"""Runs the `epp` command: starts a gateway, serves, checks a configuration, writes the bootstrap of Envoy."""

import argparse
import asyncio
import contextlib
import difflib
import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn, get_args

import msgspec
import uvloop

from epp.base.errors import ConfigError, usable
from epp.base.types import Address
from epp.config.policy import RuleName
from epp.config.settings import load_config
from epp.observe.telemetry.logs import setup_logging
from epp.serve.admin_commands import fetch, record, table
from epp.serve.envoy.files import bootstrap, write_first, write_if_changed

_DESCRIPTION = """\
This endpoint picker for Envoy routes each LLM request to the model server that can answer soonest.
The picker counts what each server's prefix cache holds, which LoRA adapters the server has loaded,
and how many prompt tokens it still has to compute.
"""
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
_COMPLETION = """\
_epp() {{
  local words="{commands}"
  if [ "$COMP_CWORD" -gt 1 ]; then case "${{COMP_WORDS[1]}}" in
{cases}
  esac; fi
  COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o bashdefault -o default -F _epp epp
"""


class WordsParser(argparse.ArgumentParser):
    """Refuses a word that is no command and no option, with the one that was probably meant. argparse alone
    says of `epp check --confg x` only that `--config` is missing.
    """

    commands: Mapping[str, Any] = {}
    """The commands of this parser, by name."""

    def option(self, usage: str, text: str = argparse.SUPPRESS, **how: Any) -> None:
        """Add an option or an argument, as the help shows it: `--policy FILE` is a path, `--json` a switch,
        `file FILE` an argument. Without a text the help leaves it out. how: as in `add_argument`.
        """
        name, _, shown = usage.partition(" ")
        kind = Path if shown in ("FILE", "DIR") else str
        usual = {"metavar": shown, "type": kind} if shown else {"action": "store_true"}
        self.add_argument(name, help=text, **usual | how)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        for word in args or ():
            is_option = re.match(r"--?[a-zA-Z]", word) is not None
            if not is_option and not self.commands:
                continue
            name = word.partition("=")[0]
            known = self._option_string_actions if is_option else self.commands
            if not any(each.startswith(name) if is_option else each == name for each in known):
                meant = difflib.get_close_matches(name, known, n=1)
                all_words = ", ".join({**self.commands, **known})
                what = f"did you mean {meant[0]}?" if meant else f"there are {all_words}"
                self.error(f"there is no {'option' if is_option else 'command'} {name}; {what}")
            if not is_option:
                break
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Say of `--window 5m` what to write, where argparse says `invalid int value`."""
        super().error(re.sub(r"invalid \w+ value: '(.*)'", r"\1: write a number, without a unit", message))

    def options(self) -> list[str]:
        """Return the options that the help names."""
        shown = [each for each in self._actions if each.help is not argparse.SUPPRESS]
        return [name for each in shown for name in each.option_strings if name.startswith("--")]


def command_line() -> WordsParser:
    parser = WordsParser(
        prog="epp",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"epp {version('prefix-gateway')}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    parser.commands = commands.choices

    def add(run: Callable[[argparse.Namespace], int], name: str, example: str) -> WordsParser:
        """Add a command. run: returns the exit status; its docstring is the help of the command."""
        shown = f"for example: epp {name} {example}"
        command = commands.add_parser(name, help=run.__doc__, description=run.__doc__, epilog=shown)
        command.set_defaults(run=run)
        return command

    _up_options(add(_up, "up", "--server 10.0.0.1:8000 --server http://vllm-b:8000"))
    serve = add(_serve, "serve", "--config config.yaml")
    check = add(_check, "check", "--config config.yaml")
    envoy = add(_envoy_config, "envoy-config", "--config config.yaml")
    for command in (serve, check, envoy):
        command.option("--config FILE", "configuration file (YAML)", required=True)
        command.option("file FILE", nargs="?", type=partial(_bare, "--config"))
    serve.option("--worker N", type=int)
    serve.option("--hub FILE")
    check.option("--verbose", "print the configuration with all defaults, as YAML")
    check.option("--json", "print the configuration with all defaults, as JSON")
    envoy.option(
        "--output FILE",
        "write the bootstrap to this file instead of printing it; the file is replaced as a whole or not at all",
    )
    explain = add(_explain, "explain", "--admin http://127.0.0.1:9090")
    recording = add(_record, "record", "--for 600 monday.rec")
    for command in (explain, recording):
        text = "admin address of the picker (default %(default)s)"
        command.option("--admin URL", text, default="http://127.0.0.1:9090")
    text = "count the requests of the last SECONDS seconds, 900 at most (default %(default)s)"
    explain.option("--window SECONDS", text, type=_count, default=600)
    explain.option("--json", "print JSON")
    recording.option("file FILE", "file to write, which must not exist yet")
    text = "stop after SECONDS seconds (default: record until Ctrl-C)"
    recording.option("--for SECONDS", text, dest="seconds", type=_positive)
    recording.option(
        "--max-bytes N", "stop when FILE has N bytes (default %(default)s)", type=_count, default=2**28
    )
    _replay_options(add(_replay, "replay", "monday.rec --rule least-cost round-robin"))
    add(_completion, "completion", "> epp.sh; . ./epp.sh")
    return parser


def _up_options(command: WordsParser) -> None:
    command.option(
        "--server HOST:PORT",
        "model server, by address, name or URL, once for each; the port is 8000 if none is named; names are looked up again every 5 s",
        action="append",
        required=True,
    )
    command.option(
        "--port PORT",
        "address of the gateway: PORT for this machine alone, or IP:PORT, such as 0.0.0.0:8080 (default %(default)s)",
        type=_place,
        default="127.0.0.1:8080",
    )
    text = "address of the live page and the metrics: PORT or IP:PORT (default %(default)s)"
    command.option("--page PORT", text, type=_place, default="127.0.0.1:9090")
    command.option("address HOST:PORT", nargs="?", type=partial(_bare, "--server"))
    command.option("--policy FILE", "policy file; each change of it is put in use")
    text = "serve clients over TLS with these PEM files"
    command.option("--tls FILE", text, nargs=2, metavar=("CERT", "KEY"))
    command.option("--write DIR", "keep the files of picker and Envoy in DIR, for `epp serve`")


def _replay_options(command: WordsParser) -> None:
    command.option("recordings RECORDING", "recording that `epp record` wrote", nargs="+", type=Path)
    text = "policy files to compare with the recorded policy"
    command.option("--policy FILE", text, nargs="+", default=[])
    text = "rules to compare, each in the recorded policy: %(choices)s"
    command.option("--rule RULE", text, nargs="+", choices=get_args(RuleName), default=[])
    command.option("--load X", "multiply the rate of requests by X (default 1)", type=_positive, default=1.0)
    command.option("--servers N", "simulate N servers, not the recorded ones", type=_count, default=0)
    command.option("--json FILE", "write the table as JSON")


def _bare(option: str, text: str) -> NoReturn:
    """Refuse a value without its option."""
    raise argparse.ArgumentTypeError(f"write {option} {text}")


def _place(text: str) -> Address:
    try:
        return Address.parse(text if ":" in text else f"127.0.0.1:{text}")
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text}: write PORT or IP:PORT") from error


def _positive(text: str) -> float:
    if not 0 < float(text) < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: write a number above 0")
    return float(text)


def _count(text: str) -> int:
    if (number := _positive(text)) % 1:
        raise argparse.ArgumentTypeError(f"{text}: write a whole number")
    return int(number)


def main(argv: list[str] | None = None) -> int:
    """Run a command. Return its exit status, which is 2 if the configuration cannot be used."""
    args = command_line().parse_args((sys.argv[1:] if argv is None else argv) or ["--help"])
    try:
        status = int(args.run(args))
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


def _up(args: argparse.Namespace) -> int:
    """Run the picker and Envoy before model servers, without a cluster, until Ctrl-C ends both."""
    from epp.serve import process, up  # noqa: PLC0415 - see `_serve`

    if args.port == args.page:
        raise ConfigError(f"--page {args.page}: is the address of --port too; name another port")
    for flag, address in (("--port", args.port), ("--page", args.page)):
        if why := up.unusable(address):
            raise ConfigError(f"{flag} {address}: {why}; name another port, on an address of this machine")
    process.raise_file_limit()
    servers = [up.parsed(text) for text in args.server]
    where = {"listen": args.port, "page": args.page, "policy": args.policy, "write": args.write}
    return int(uvloop.run(up.up(servers, tls=args.tls or (), **where)))


def _completion(_: argparse.Namespace) -> int:
    """Print a script that completes commands and options in bash."""
    parser = command_line()
    cases = [
        f"    {name}) words={shlex.quote(' '.join(each.options()))} ;;"
        for name, each in parser.commands.items()
    ]
    commands = " ".join([*parser.commands, *parser.options()])
    print(_COMPLETION.format(commands=commands, cases="\n".join(cases)), end="")
    return 0


def _explain(args: argparse.Namespace) -> int:
    """Ask a running picker why prompt tokens were not cached where they were sent, and what to change."""
    found = fetch(args.admin, window_s=args.window)
    print(msgspec.json.format(msgspec.json.encode(found)).decode() if args.json else table(found))
    return 0


def _record(args: argparse.Namespace) -> int:
    """Record the requests of a running picker for `epp replay`: sizes, times and hashes, but no text."""
    counts = record(args.file, admin=args.admin, max_bytes=args.max_bytes, seconds=args.seconds)
    print(counts)
    if counts.requests:
        print(f"next: epp replay {args.file}")
    return 0


def _replay(args: argparse.Namespace) -> int:
    """Run recorded requests through the picker on simulated servers, once for each policy, and compare."""
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


def _envoy_config(args: argparse.Namespace) -> int:
    """Print a complete Envoy bootstrap for this configuration."""
    config = load_config(args.config)
    text = bootstrap(config)
    with contextlib.suppress(OSError):  # the picker says which file it cannot write
        if Path(config.envoy.eds_file).parent.is_dir():
            write_first(config)
    if args.output is None:
        print(text, end="")
        return 0
    with usable(f"--output {args.output}", advice="name a file that can be written"):
        write_if_changed(args.output, text.encode())
    return 0


def _check(args: argparse.Namespace) -> int:
    """Check the configuration, policy, endpoints, certificates and folders."""
    from epp.serve import preflight  # noqa: PLC0415 - see `_serve`
    from epp.serve.inputs import load_inputs  # noqa: PLC0415 - as above

    config = load_config(args.config)
    inputs = load_inputs(config)
    for remark in (*preflight.inspect(config), *preflight.contradictions(config, inputs.policy)):
        print(f"epp: {remark}", file=sys.stderr)
    listed = inputs.listed.endpoints
    if not listed and config.kubernetes is None:
        raise ConfigError(
            f"{config.endpoints_file}: endpoints: the list is empty, so every request would get 503; write one as "
            '{name: a, address: "10.0.0.1:8000"}'
        )
    if args.verbose or args.json:
        endpoints = [{"name": e.name, "address": str(e.address), "model": e.model} for e in listed]
        shown = {"config": config, "policy": inputs.policy, "endpoints": endpoints}
        print((msgspec.json if args.json else msgspec.yaml).encode(shown).decode().rstrip())
        return 0
    count = f"{len(listed)} endpoint{'s' * (len(listed) != 1)}"
    where = count if config.kubernetes is None else "endpoints from the cluster"
    print(
        f"OK: {where}, rule {inputs.policy.spec.rule}, picker on {config.listen.address}, gateway {preflight.named(config)}"
    )
    return 0


def _serve(args: argparse.Namespace) -> int:
    """Run the picker. On SIGTERM it lets the requests in flight end, then stops."""
    from epp.serve import app, process  # noqa: PLC0415 - they import everything, which other commands need not wait for
    from epp.serve.inputs import load_inputs  # noqa: PLC0415 - as above

    config = load_config(args.config)
    process.raise_file_limit()
    if args.worker is None and config.workers > 1:
        setup_logging(config.log)
        load_inputs(config, tolerant=True)  # report a fault once, not once for each worker
        meet = config.sharing.redis is None
        return asyncio.run(process.Supervisor(config_path=args.config, count=config.workers, meet=meet).run())
    if args.worker is not None:
        process.follow_parent()
    served = app.App(config, worker=args.worker or 0, hub=args.hub)
    process.tune()
    return int(uvloop.run(served.run()))
