"""`python -m tests.environments NAME COMMAND`: prepares an environment that tests need outside the checkout,
writes its requirement files anew, or uses it by hand.
"""

import argparse
import pkgutil
import sys
from typing import Final

from tests.harness.cached_builds import BuildFailedError

COMMANDS: Final = {
    "vllm build": "tests.vllm_env.environment:build",
    "vllm lock": "tests.vllm_env.environment:lock",
    "vllm record": "tests.vllm_env.recording:record_all",
    "engine build": "tests.engine_env:build",
    "engine lock": "tests.engine_env:lock",
    "engine run": "tests.engine_env:become_module",
    "clients build": "tests.group_env:CLIENTS.build",
    "clients lock": "tests.group_env:CLIENTS.lock",
    "rivals build": "tests.group_env:RIVALS.build",
    "rivals lock": "tests.group_env:RIVALS.lock",
    "cluster build": "tests.cluster_env.go_programs:build_all",
    "cluster lock": "tests.cluster_env.environment:lock",
    "cluster up": "tests.cluster_env.control_plane:keep_up",
    "image build": "tests.image_env.environment:build",
    "image lock": "tests.image_env.environment:lock",
}
"""The function of each command. Only its module is imported."""


def main() -> int:
    """Run a command with the words that follow it. 1: a build failed; 130: a person stopped it."""
    about = "\n".join(["Commands:", *COMMANDS])
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m tests.environments", epilog=about, formatter_class=raw)
    parser.add_argument("name", choices=dict.fromkeys(words.split()[0] for words in COMMANDS))
    parser.add_argument("command", choices=dict.fromkeys(words.split()[1] for words in COMMANDS))
    parser.add_argument("words", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    if (function := COMMANDS.get(f"{args.name} {args.command}")) is None:
        parser.error(f"{args.name} has no command {args.command}")
    try:
        pkgutil.resolve_name(function)(*args.words)
    except BuildFailedError as error:
        print(f"{args.name}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{args.name}: interrupted; nothing half-made is left under a final name", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
