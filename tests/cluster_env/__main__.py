"""`python -m tests.cluster_env build|lock|up`: prepare the control plane of the tests, or run a control plane
by hand.
"""

from __future__ import annotations

import sys
import tempfile
from functools import partial
from pathlib import Path

from tests.cluster_env import environment
from tests.cluster_env.control_plane import ControlPlane
from tests.cluster_env.go_programs import EnvoyGateway, GatewaySuite
from tests.harness.build_command import build_and_tell, command_line, sayer

_say = sayer("cluster-env")


def build() -> None:
    found = environment.locate()
    build_and_tell(found.folder, ready=found.ready, build=lambda: environment.build(progress=_say), say=_say)
    for program in (EnvoyGateway, GatewaySuite):
        place = program.locate()
        build_and_tell(
            place.folder, ready=place.ready, build=partial(program.prepare, progress=_say), say=_say
        )


def up() -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        ControlPlane(environment.require(), folder=Path(folder)) as plane,
    ):
        _say(f"up in {plane.ready_after_s:.1f} s")
        _say(f"export KUBECONFIG={plane.kubeconfig} PATH={plane.tools.kubectl.parent}:$PATH")
        _say("Enter or ctrl-C ends it")
        sys.stdin.readline()


if __name__ == "__main__":
    sys.exit(command_line("cluster-env", __doc__, {"build": build, "lock": environment.lock, "up": up}))
