"""The control plane that the cluster tests run on. It is a real control plane. After a fault none of its
processes stays.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests.cluster_env import environment

pytest_plugins = ["pytester", "tests.cluster_env.fixtures"]

REPOSITORY = Path(__file__).parents[2]


def runs(pid: int) -> bool:
    """Tell whether a process has this id and has not ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in {"Z", "X"}


@pytest.mark.cluster
def test_nothing_of_a_control_plane_outlives_a_launcher_that_is_killed(
    cluster_tools: environment.ClusterTools, tmp_path: Path
) -> None:
    launcher = textwrap.dedent(f"""
        import sys
        from pathlib import Path
        from tests.cluster_env import control_plane, environment

        tools = environment.ClusterTools(folder=Path({str(cluster_tools.folder)!r}))
        plane = control_plane.ControlPlane(tools, folder=Path({str(tmp_path)!r}))
        plane.start()
        print(*plane.pids(), flush=True)
        sys.stdin.read()
    """)
    command = [sys.executable, "-c", launcher]
    with subprocess.Popen(command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert len(pids) == 4
        process.send_signal(signal.SIGKILL)
        process.wait()
        deadline = time.monotonic() + 60
        while any(runs(pid) for pid in pids):
            assert time.monotonic() < deadline, f"still running: {[pid for pid in pids if runs(pid)]}"
            time.sleep(0.05)


def test_missing_tools_name_the_command_that_builds_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(environment.ClusterToolsError, match=r"python -m tests\.cluster_env build"):
        environment.require()
