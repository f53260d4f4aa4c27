"""One child process: its own session, its output in files, waiting until it is ready, and every way to end
it.

The session keeps the test run's signals away from the process, and makes its whole process group one unit to
kill.
"""

import asyncio
import contextlib
import os
import signal as signals
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

_POLL_S: Final = 0.02
_TAIL_LINES: Final = 40


class ProcessFailedError(AssertionError):
    """The process ended, or was not ready in time. The message has the end of the process's output."""


async def wait_until(
    condition: Callable[[], bool | Awaitable[bool]], *, what: str, timeout_s: float = 60.0
) -> None:
    """Poll until `condition` holds. Raise an AssertionError that names `what` if it does not hold in time."""
    deadline = time.monotonic() + timeout_s
    while True:
        answer = condition()
        if await answer if isinstance(answer, Awaitable) else answer:
            return
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        await asyncio.sleep(_POLL_S)


async def connects(host: str, port: int) -> bool:
    """Tell whether something accepts TCP connections there."""
    try:
        _, writer = await asyncio.open_connection(host, port)
    except OSError:
        return False
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return True


class ManagedProcess:
    """A running child. Made by `managed_process`."""

    def __init__(self, name: str, popen: subprocess.Popen[bytes], *, stdout: Path, stderr: Path) -> None:
        self.name = name
        self.stdout = stdout
        self.stderr = stderr
        self._popen = popen

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def status(self) -> int | None:
        """The exit status. None means that the process runs. A negative number is the signal that
        ended it.
        """
        return self._popen.poll()

    def children(self) -> list[int]:
        """Return the process ids of its direct children, the oldest first."""
        text = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text()
        return sorted(int(pid) for pid in text.split())

    def signal(self, number: signals.Signals) -> None:
        """Send a signal to this process alone."""
        self._popen.send_signal(number)

    def kill(self) -> None:
        """Send SIGKILL to the whole group."""
        self._signal_group(signals.SIGKILL)

    def freeze(self) -> None:
        """Send SIGSTOP to the whole group. The group keeps its connections and answers nothing."""
        self._signal_group(signals.SIGSTOP)

    def thaw(self) -> None:
        self._signal_group(signals.SIGCONT)

    async def wait(self, *, timeout_s: float = 60.0) -> int:
        """Wait for the exit status of the process."""
        await wait_until(lambda: self.status is not None, what=f"{self.name} ends", timeout_s=timeout_s)
        return self._popen.returncode

    async def terminate(self, *, timeout_s: float = 60.0) -> int:
        """Send SIGTERM and wait for the exit status. Send SIGKILL if this takes too long."""
        if self.status is None:
            self.signal(signals.SIGTERM)
        try:
            return await self.wait(timeout_s=timeout_s)
        except AssertionError:
            self.kill()
            raise

    async def wait_ready(
        self, probe: Callable[[], bool | Awaitable[bool]], *, what: str = "ready", timeout_s: float = 60.0
    ) -> None:
        """Poll `probe` until it succeeds. If the process ends first, fail at once with the end of its log."""

        async def ready() -> bool:
            if self.status is not None:
                raise ProcessFailedError(f"{self.name} ended with {self.status}\n{self.tail()}")
            answer = probe()
            return await answer if isinstance(answer, Awaitable) else answer

        try:
            await wait_until(ready, what=f"{self.name} {what}", timeout_s=timeout_s)
        except ProcessFailedError:
            raise
        except AssertionError as error:
            raise ProcessFailedError(f"{error}\n{self.tail()}") from error

    async def wait_printed(self, words: str) -> str:
        """Wait until its output has these words. Return the output."""
        await self.wait_ready(lambda: words in self.output(), what=f"prints {words}", timeout_s=120)
        return self.output()

    def output(self) -> str:
        return self.stderr.read_text(errors="replace") + self.stdout.read_text(errors="replace")

    def tail(self, *, lines: int = _TAIL_LINES) -> str:
        """Return the end of its output."""
        return "\n".join(self.output().splitlines()[-lines:])

    def _signal_group(self, number: signals.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)


@asynccontextmanager
async def managed_process(
    name: str,
    args: Sequence[str | Path],
    *,
    directory: Path,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> AsyncIterator[ManagedProcess]:
    """Run `args` until the block ends. Output goes to `directory`/`name`.out and .err."""
    stdout, stderr = directory / f"{name}.out", directory / f"{name}.err"
    with stdout.open("ab") as out, stderr.open("ab") as err:
        popen = subprocess.Popen(
            [str(arg) for arg in args],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env={**os.environ, **(env or {})},
            cwd=cwd,
            start_new_session=True,
        )
    process = ManagedProcess(name, popen, stdout=stdout, stderr=stderr)
    try:
        yield process
    finally:
        process.thaw()
        process.kill()
        popen.wait(timeout=60)  # a large process on a busy machine
