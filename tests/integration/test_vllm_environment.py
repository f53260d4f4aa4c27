"""The launcher of vLLM servers, without vLLM: what remains when something goes wrong."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from pathlib import Path

from tests.vllm_env.environment import VllmEnvironment

REPOSITORY = Path(__file__).parents[2]


def pretend_environment(folder: Path, *, script: str) -> VllmEnvironment:
    """Make an environment whose Python is a shell script."""
    pretended = VllmEnvironment(folder=folder / "vllm-0", model_folder=folder / "tiny-model-0")
    pretended.model_folder.mkdir()
    pretended.python.parent.mkdir(parents=True)
    pretended.python.write_text(f"#!/bin/sh\n{script}\n")
    pretended.python.chmod(0o755)
    return pretended


def test_no_process_of_a_server_outlives_a_launcher_that_is_killed(tmp_path: Path) -> None:
    """The server's two processes hold a pipe open. The pipe ends when both have ended."""
    pretend_environment(tmp_path, script="sleep 1000 & exec sleep 1000")
    launcher = textwrap.dedent(f"""
        import os, sys
        from pathlib import Path
        from tests.vllm_env.environment import VllmEnvironment
        from tests.vllm_env.server import VllmServer

        folder = Path({str(tmp_path)!r})
        os.mkfifo(folder / "orphan.log")
        environment = VllmEnvironment(folder=folder / "vllm-0", model_folder=folder / "tiny-model-0")
        print("ready", flush=True)
        VllmServer(environment, name="orphan", folder=folder).start()
        print("started", flush=True)
        sys.stdin.read()
    """)
    command = [sys.executable, "-c", launcher]
    with subprocess.Popen(command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        with (tmp_path / "orphan.log").open("rb") as log:
            assert process.stdout.readline() == b"started\n"
            process.send_signal(signal.SIGKILL)
            process.wait()
            assert log.read() == b""  # returns once every process that could write has ended
