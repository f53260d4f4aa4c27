"""Follows one configuration file, and passes on its content whenever it has changed.

The module compares the content itself, four times a second. This notices renames, the symlink swaps of
mounted ConfigMaps and writes in place, on any file system and without a dependency, and costs only a few
reads of a small file. A change is passed on when two looks in a row see the same content, so a half-written
file is not used.

If content is refused, or the file cannot be read, the old content stays in use. The reason is logged once,
and the next different content is tried. Content that could not be used for the moment (OSError) is tried
again. `app` calls this module.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final, Generic, TypeVar

from epp.base.errors import ConfigError

_log = logging.getLogger(__name__)

_POLL_S: Final = 0.25
_MAX_BYTES: Final = 16 * 2**20

T = TypeVar("T")


class FileWatcher(Generic[T]):
    """Calls `on_change` with the result of `parse` for each new content of `path`. A ConfigError refuses this
    content. An OSError postpones it.

    `parse` runs in a thread, because a long YAML file takes seconds, for which requests should not wait.
    `applied` is the content already in use. Without `applied`, `on_change` gets the first content too.
    `on_result` is called after every attempt: True if the content was taken, False if it was refused or the
    file became unreadable.
    """

    def __init__(
        self,
        path: Path,
        *,
        parse: Callable[[bytes], T],
        on_change: Callable[[T], None],
        on_result: Callable[[bool], None] = lambda _: None,
        applied: bytes | None = None,
        poll_s: float = _POLL_S,
    ) -> None:
        self.path = path
        self._parse = parse
        self._on_change = on_change
        self._on_result = on_result
        self._poll_s = poll_s
        self._handed_over = applied
        self._glimpsed: bytes | None = None
        self._refused = ""
        """Why the content that was passed on last is not in use."""
        self.fault = ""
        """Why the content of the file is not in use. Empty: it is."""

    async def run(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(self._poll_s)

    async def look(self) -> None:
        """Check the file once. A change is passed on at the second check that finds it."""
        glimpsed, self._glimpsed = self._glimpsed, None
        try:
            # The file is read in a thread, so that a network file system that hangs cannot stop the picks.
            content = await asyncio.to_thread(self._read)
        except OSError as error:
            reason = error.strerror or type(error).__name__
            self._report(f"{self.path} cannot be read; what was read before stays: {reason}")
            return
        if content == self._handed_over:
            if self.fault != self._refused:
                self._report(self._refused, good="is in use again")
        elif content == glimpsed:
            await self._hand_over(content)
        else:
            self._glimpsed = content

    def _read(self) -> bytes:
        with self.path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
        if len(content) > _MAX_BYTES:
            raise OSError(27, f"larger than {_MAX_BYTES} bytes")
        return content

    async def _hand_over(self, content: bytes) -> None:
        refused = ""
        try:
            self._on_change(await asyncio.to_thread(self._parse, content))
        except OSError as error:
            self._report(f"{self.path} has changed and cannot be used yet; will try again: {error}")
            return
        except ConfigError as error:
            refused = f"{self.path} has changed and is refused; the old content stays in use: {error}"
        self._handed_over, self._refused = content, refused
        self._report(refused, good="has changed and is in use")

    def _report(self, fault: str, *, good: str = "") -> None:
        """Pass on the result, and log it. A fault that lasts is reported once, not four times a second."""
        if fault and fault == self.fault:
            return
        self.fault = fault
        _log.log(logging.ERROR if fault else logging.INFO, "%s", fault or f"{self.path} {good}")
        self._on_result(not fault)
