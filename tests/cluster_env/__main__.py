"""`python -m tests.cluster_env build|lock|up`: prepare the control plane of the tests, or run one to look at."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.cluster_env import environment
from tests.cluster_env.control_plane import ControlPlane
from tests.harness.cached_builds import BuildFailedError, folder_bytes


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.cluster_env", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("build", help="build the cached tools; at once if they are there")
    commands.add_parser("lock", help="write requirements/cluster*.txt and the indirect part of go.mod anew")
    commands.add_parser("up", help="run a control plane until interrupted, and say how to reach it")
    command: str = parser.parse_args().command
    try:
        if command == "build":
            build()
        elif command == "lock":
            environment.lock()
        else:
            up()
    except BuildFailedError as error:
        print(f"cluster-env: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("cluster-env: interrupted; nothing half-made is left under a final name", file=sys.stderr)
        return 130
    return 0


def build() -> None:
    started_at = time.monotonic()
    found = environment.locate().ready
    tools = environment.build(progress=_say)
    if found:
        _say(f"ready at {tools.folder}")
    else:
        megabytes = folder_bytes(tools.folder) / 1e6
        _say(f"ready at {tools.folder}: {megabytes:.0f} MB, {time.monotonic() - started_at:.0f} s")


def up() -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        ControlPlane(environment.require(), folder=Path(folder)) as plane,
    ):
        _say(f"up in {plane.ready_after_s:.1f} s")
        _say(f"export KUBECONFIG={plane.kubeconfig} PATH={plane.tools.kubectl.parent}:$PATH")
        _say("Enter or ctrl-C ends it")
        sys.stdin.readline()


def _say(line: str) -> None:
    print(f"cluster-env: {line}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
