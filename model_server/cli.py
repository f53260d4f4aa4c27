"""The command `model-server` turns flags into settings, prints one message for each mistake, and returns the
exit code.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import TYPE_CHECKING

import uvloop

from model_server import serve_flags
from model_server.pods import lora_sync
from model_server.runners.hf.errors import ModelError
from model_server.server.errors import ApiError
from model_server.server.serve import serve
from model_server.tiers.errors import StoreError
from model_server.weights.cache import WeightsError
from model_server.weights.known import find

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001 - argparse has no public name for it

_ABOUT = """\
An OpenAI-compatible model server. Its block pool, chained block hashes, continuous batching and preemption
work as in vLLM, and its metrics have vLLM's names. --runner chooses what computes the answers:
  cost  A cost model gives the time of each step, and the words of the answers are made up. The same
        prompt always gets the same answer. This runner needs neither torch nor a GPU. Use it to see
        what a gateway's routing gains.
  hf    A real model of the Llama, Qwen, GPT-2 or OPT family computes the answers, through transformers,
        on CPU or CUDA. Install the extra first: pip install 'prefix-gateway[engine]'
"""

_EXAMPLES = """\
examples:
  model-server serve --port 8000 --model demo
      then: curl localhost:8000/v1/completions -d '{"model": "demo", "prompt": "Hello"}'
  model-server serve --port 0 --port-file port.txt --lora style --lora law=/adapters/law --max-loras 2
      takes any free port, writes its number to port.txt, and loads two LoRA adapters; one batch may mix them
  model-server serve --num-blocks 512 --prefill-tokens-per-s 2000 --decode-step-ms 40
      simulates a small, slow card: 8,192 tokens of cache, half a second for 1,000 prompt tokens
  model-server serve --speed 10
      runs every step ten times as fast as the costs say
  model-server serve --runner hf --model smollm2
      runs SmolLM2-135M-Instruct on the CPU; the first start fetches 93 MB and converts them in a minute or two
  model-server serve --runner hf --model /models/qwen --device cuda --num-blocks 8192
      runs the model in a folder that has config.json, *.safetensors and tokenizer.json
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Return 0 if a signal ended the command after draining, 2 for invalid settings, 1 if the
    port is taken.
    """
    args = command_line().parse_args(argv)
    command: Callable[[argparse.Namespace], int] = args.run
    try:
        status = command(args)
        if sys.stdout is not None:  # None: the program was started with standard output closed
            sys.stdout.flush()
    except BrokenPipeError:  # a reader such as `head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return status


def _serve(args: argparse.Namespace) -> int:
    try:
        settings = serve_flags.settings(args)
        uvloop.run(serve(settings, announce=_say))
    except (ValueError, ApiError, ModelError, StoreError, WeightsError) as error:
        print(f"model-server: {error}", file=sys.stderr)
        return 2
    except socket.gaierror as error:
        print(f"model-server: --host {settings.host}: {error.strerror}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"model-server: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # Ctrl-C came before the server listened.
        return 130
    return 0


def _fetch(args: argparse.Namespace) -> int:
    try:
        print(find(args.model, progress=_say))
    except WeightsError as error:
        print(f"model-server: {error}", file=sys.stderr)
        return 2
    return 0


def _say(line: str) -> None:
    print(line, flush=True)


def _version() -> str:
    """Return the version of the installed package. The tests' environments run the sources in place."""
    try:
        return metadata.version("prefix-gateway")
    except metadata.PackageNotFoundError:
        return "not installed"


def command_line() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="model-server",
        description="An OpenAI-compatible model server, whose prefix cache works as in vLLM, and two helpers.",
        epilog="model-server serve --help describes the server and has examples.",
    )
    parser.add_argument("--version", action="version", version=f"model-server {_version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_serve(commands)
    _add_fetch(commands)
    _add_lora_sync(commands)
    return parser


def _add_serve(commands: Commands) -> None:
    run = commands.add_parser(
        "serve",
        help="run the server until SIGTERM or SIGINT",
        # argparse prints the usage above an error. The full list of flags would hide the error.
        usage="model-server serve [OPTIONS]",
        description=_ABOUT,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    run.set_defaults(run=_serve)
    serve_flags.add_flags(run)


def _add_fetch(commands: Commands) -> None:
    fetch = commands.add_parser(
        "fetch",
        help="download and convert a named model now, so that no server has to do so at its first start",
        description="Download and convert a model into the cache, then print the model's folder.",
    )
    fetch.set_defaults(run=_fetch)
    fetch.add_argument(
        "model",
        metavar="MODEL",
        help="name of the model: smollm2 (93 MB to download, 275 MB after conversion)",
    )


def _add_lora_sync(commands: Commands) -> None:
    sync = commands.add_parser(
        "lora-sync",
        help="run as a sidecar that loads and unloads adapters until a server has the LoRA adapters that a file lists",
        description="Load and unload adapters until one running server has the adapters that a file lists. Do so again whenever the "
        "file changes. Adapters that other programs loaded stay, unless --prune is given.",
    )
    sync.set_defaults(run=lora_sync.run)
    lora_sync.add_flags(sync)
