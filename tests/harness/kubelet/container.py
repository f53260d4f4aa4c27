"""One container of a pod: its process, its probes, its restarts, its hooks, and its status.

Invariants: there is at most one process at a time. A stop is final. The report (`status`) is always current,
and `changed` is called after each change of the report. Times are wall-clock times, because the API shows
them. Called by `pod`.
"""

import asyncio
import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tests.harness.kubelet import probes
from tests.harness.kubelet.api import JsonObject
from tests.harness.kubelet.images import Image
from tests.harness.kubelet.variables import ConfigError

_LAUNCHER: Final = Path(__file__).with_name("launch.py")
_RETRY_S: Final = 1.0
_BACKOFF_S: Final = 10.0
_BACKOFF_MAX_S: Final = 300.0
_BACKOFF_FORGOTTEN_S: Final = 600.0


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


@dataclass(slots=True)
class Process:
    """A running container: the shim that waits, and the container's first process."""

    shim: asyncio.subprocess.Process
    pid: int
    """The process id in the kubelet's PID namespace."""
    container_id: str
    started_at: str
    variables: dict[str, str]
    uid: int
    gid: int


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the pod gives to each of its containers."""

    folder: Path
    """The folder for this container's files."""
    log: Path
    image: Image | None
    image_name: str
    plan: Callable[[], Awaitable[dict[str, Any]]]
    """Returns the input of `launch`, made again for each start. Raises ConfigError if something is missing.
    """
    target: Callable[[Callable[[Sequence[str]], Awaitable[bool]]], probes.Target]
    changed: Callable[[], None]
    grace_s: float


@dataclass(slots=True)
class _Readiness:
    started: bool = False
    ready: bool = False
    tasks: list[asyncio.Task[None]] = field(default_factory=list)


class Container:
    """Made by `pod`, which runs `run` as a task."""

    def __init__(self, spec: JsonObject, surroundings: Surroundings, *, restart: str) -> None:
        """`restart`: Always, OnFailure or Never."""
        self.spec = spec
        self.name: Final[str] = spec["name"]
        self.restarts = 0
        self._around = surroundings
        self._restart = restart
        self._process: Process | None = None
        self._readiness = _Readiness()
        self._state: JsonObject = {"waiting": {"reason": "PodInitializing"}}
        self._last: JsonObject = {}
        self._container_id = ""
        self._stop_until = 0.0
        self._failed_probe = asyncio.Event()
        self._stop_asked = asyncio.Event()
        self.over = asyncio.Event()
        """Set when it will not run again."""
        self.exit_code: int | None = None
        """The exit code of its last run."""

    @property
    def started(self) -> bool:
        """Tell whether the containers after it may start: its startup probe passed, or it has no startup
        probe and runs.
        """
        return self._readiness.started

    @property
    def ready(self) -> bool:
        return self._readiness.ready

    @property
    def _stopping(self) -> bool:
        return self._stop_asked.is_set()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def status(self) -> JsonObject:
        """Return its entry in the pod's containerStatuses."""
        return {
            "name": self.name,
            "image": self._around.image_name,
            "imageID": self._around.image_name,
            "containerID": f"containerd://{self._container_id}" if self._container_id else "",
            "ready": self.ready,
            "started": self.started,
            "restartCount": self.restarts,
            "state": self._state,
            "lastState": self._last,
        }

    async def run(self) -> None:
        """Run the container, again and again by its restart policy, until it is stopped."""
        backoff_s = 0.0
        while not self._stopping:
            began_at = time.monotonic()
            if not await self._start():
                await self._pause(_RETRY_S)
                continue
            await self._watch_over()
            if self._stop_asked.is_set() or not self._again():
                break
            if time.monotonic() - began_at > _BACKOFF_FORGOTTEN_S:
                backoff_s = 0.0
            if backoff_s:
                self._show(
                    {"waiting": {"reason": "CrashLoopBackOff", "message": f"back-off {backoff_s:.0f}s"}}
                )
                await self._pause(backoff_s)
            backoff_s = min(max(backoff_s * 2, _BACKOFF_S), _BACKOFF_MAX_S)
            self.restarts += 1
        self.over.set()
        self._around.changed()

    async def stop(self, *, until: float) -> None:
        """Run preStop, send SIGTERM, and SIGKILL at `until` (monotonic). Returns when it is over."""
        self._stop_until = until
        self._stop_asked.set()
        await self.over.wait()

    def kill(self, number: int) -> None:
        """Send a signal to its first process, as a crash or the kernel would."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, number)

    async def execute(self, command: Sequence[str]) -> bool:
        """Run a command inside the container. Return whether the command exited with 0."""
        process = self._process
        if process is None:
            return False
        inside = ["nsenter", "-t", str(process.pid), "--mount", "--net", "--pid", "--uts", "--ipc"]
        inside += ["-S", str(process.uid), "-G", str(process.gid), "--", "/usr/bin/env", "-i"]
        inside += [f"{name}={value}" for name, value in process.variables.items()]
        with self._around.log.open("ab") as log:
            child = await asyncio.create_subprocess_exec(
                *inside, *command, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        try:
            return await child.wait() == 0
        finally:
            if child.returncode is None:
                child.kill()
                await child.wait()

    async def _start(self) -> bool:
        """Start the process. Return whether it runs now. If not, the state of the container says why."""
        if self._around.image is None:
            message = f"no such image in the table: {self._around.image_name}"
            self._show({"waiting": {"reason": "ErrImagePull", "message": message}})
            return False
        try:
            plan = await self._around.plan()
        except ConfigError as error:
            self._show({"waiting": {"reason": "CreateContainerConfigError", "message": str(error)}})
            return False
        if self._stopping:
            return False
        self._process = await self._launch(plan)
        if self._process is None:
            return False
        self._container_id = self._process.container_id
        self._failed_probe.clear()
        self._readiness = _Readiness(started="startupProbe" not in self.spec)
        self._readiness.ready = self._readiness.started and "readinessProbe" not in self.spec
        self._show({"running": {"startedAt": self._process.started_at}})
        return True

    async def _launch(self, plan: dict[str, Any]) -> Process | None:
        container_id = secrets.token_hex(32)
        folder = self._around.folder / container_id[:12]
        (folder / "root").mkdir(parents=True)
        pid_end, shim_end = os.pipe()
        plan |= {"root": str(folder / "root"), "started_fd": shim_end}
        (folder / "spec.json").write_text(json.dumps(plan))
        with self._around.log.open("ab") as log:
            shim = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", str(_LAUNCHER), str(folder / "spec.json")),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(plan["network_fd"], shim_end),
            )
        os.close(shim_end)
        pid = await _read_all(pid_end)
        if not pid:
            self._ended(await shim.wait(), container_id=container_id, started_at=now())
            return None
        return Process(
            shim=shim,
            pid=int(pid),
            container_id=container_id,
            started_at=now(),
            variables=plan["variables"],
            uid=plan["uid"],
            gid=plan["gid"],
        )

    async def _watch_over(self) -> None:
        """Wait until the process has ended, by itself or because a probe failed."""
        process = self._process
        assert process is not None
        target = self._around.target(self.execute)
        probing = asyncio.create_task(self._probe(target), name=f"probes of {self.name}")
        ended = asyncio.create_task(process.shim.wait(), name=f"end of {self.name}")
        failed = asyncio.create_task(self._failed_probe.wait(), name=f"liveness of {self.name}")
        stopped = asyncio.create_task(self._stop_asked.wait(), name=f"stop of {self.name}")
        try:
            await asyncio.wait({ended, failed, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():
                own_grace = time.monotonic() + self._around.grace_s
                await self._end(process, until=self._stop_until if self._stopping else own_grace)
            await ended
        finally:
            for task in (probing, failed, stopped):
                task.cancel()
            await asyncio.gather(probing, failed, stopped, return_exceptions=True)
        self._ended(ended.result(), container_id=process.container_id, started_at=process.started_at)
        self._process = None

    async def _end(self, process: Process, *, until: float) -> None:
        """Run preStop, then send SIGTERM and SIGKILL."""
        pre_stop = self.spec.get("lifecycle", {}).get("preStop")
        if pre_stop:
            left_s = max(until - time.monotonic(), 0)
            await probes.act(pre_stop, self._around.target(self.execute), timeout_s=left_s)
        _signal(process, signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(until - time.monotonic(), 0)):
                await process.shim.wait()
        if process.shim.returncode is None:
            _signal(process, signal.SIGKILL)
            await process.shim.wait()

    async def _probe(self, target: probes.Target) -> None:
        """Startup first, then liveness and readiness side by side."""
        if startup := self.spec.get("startupProbe"):
            await self._until(startup, target, wanted=True)
            if self._failed_probe.is_set():
                return
        self._readiness.started = True
        readiness, liveness = self.spec.get("readinessProbe"), self.spec.get("livenessProbe")
        if not readiness:
            self._readiness.ready = True
        self._around.changed()
        await asyncio.gather(
            self._keep_ready(readiness, target) if readiness else asyncio.sleep(0),
            self._until(liveness, target, wanted=False) if liveness else asyncio.sleep(0),
        )

    async def _until(self, probe: JsonObject, target: probes.Target, *, wanted: bool) -> None:
        """Probe until the probe passes (`wanted`), or has failed so often in a row that the container must be
        restarted.
        """
        failures, passes = 0, 0
        await asyncio.sleep(probe.get("initialDelaySeconds", 0))
        while not self._stopping:
            if await probes.act(probe, target, timeout_s=probe.get("timeoutSeconds", 1)):
                failures, passes = 0, passes + 1
                if wanted and passes >= probe.get("successThreshold", 1):
                    return
            else:
                failures, passes = failures + 1, 0
                if failures >= probe.get("failureThreshold", 3):
                    self._failed_probe.set()
                    return
            await asyncio.sleep(probe.get("periodSeconds", 10))

    async def _keep_ready(self, probe: JsonObject, target: probes.Target) -> None:
        """Probe readiness as long as the container runs, also while it is being stopped, when it may still be
        ready.
        """
        failures, passes = 0, 0
        await asyncio.sleep(probe.get("initialDelaySeconds", 0))
        while True:
            passed = await probes.act(probe, target, timeout_s=probe.get("timeoutSeconds", 1))
            failures, passes = (0, passes + 1) if passed else (failures + 1, 0)
            before = self._readiness.ready
            if passed and passes >= probe.get("successThreshold", 1):
                self._readiness.ready = True
            elif not passed and failures >= probe.get("failureThreshold", 3):
                self._readiness.ready = False
            if self._readiness.ready != before:
                self._around.changed()
            # The kubelet does the same: a slow period does not delay the first success.
            await asyncio.sleep(
                probe.get("periodSeconds", 10) if before or passed else min(1, probe.get("periodSeconds", 10))
            )

    def _again(self) -> bool:
        return self._restart == "Always" or (self._restart == "OnFailure" and self.exit_code != 0)

    def _ended(self, code: int, *, container_id: str, started_at: str) -> None:
        self.exit_code = code
        self._readiness.ready = self._readiness.started = False
        ended = {
            "exitCode": code,
            "reason": "Completed" if code == 0 else "Error",
            "startedAt": started_at,
            "finishedAt": now(),
            "containerID": f"containerd://{container_id}",
        }
        self._last = {"terminated": ended}
        self._show({"terminated": ended})

    def _show(self, state: JsonObject) -> None:
        if "terminated" not in state and "running" not in state and state == self._state:
            return
        self._state = state
        self._around.changed()

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stop_asked.wait()


def _signal(process: Process, number: int) -> None:
    if process.shim.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)


async def _read_all(fd: int) -> bytes:
    """Read everything that is written into a pipe, and close the pipe."""
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(fd, "rb", buffering=0)
    )
    try:
        return await reader.read()
    finally:
        transport.close()
