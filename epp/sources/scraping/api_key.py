"""Reads the API key of the model servers. Called by `model_lists`, `probes`, and at start."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Final

_log = logging.getLogger(__name__)
_MOST_KEY_BYTES: Final = 4096
_KEY: Final = re.compile(rb"[!-~]+")


class ApiKey:
    """The API key of the model servers, in a file. The file is read at each question, so a renewed key is
    used. Neither the log nor an error shows the key.
    """

    def __init__(self, path: str) -> None:
        """path: empty if the servers want no key."""
        self._path = path
        self._fault = ""

    def fault(self) -> str:
        """Return what is wrong with the file. Empty: nothing."""
        return self._read()[1] if self._path else ""

    def headers(self) -> dict[str, str]:
        """Return the header of a question, which has the key. Empty: the servers want none, or the file
        cannot be used.
        """
        key, fault = self._read() if self._path else ("", "")
        if fault and fault != self._fault:
            _log.error("model servers are asked without a key: models.apiKeyFile: %s", fault)
        self._fault = fault
        return {"Authorization": f"Bearer {key}"} if key else {}

    def _read(self) -> tuple[str, str]:
        try:
            with Path(self._path).open("rb") as file:
                key = file.read(_MOST_KEY_BYTES + 1).strip()
        except OSError as error:
            return "", f"{self._path}: {error.strerror}; correct the path"
        if len(key) > _MOST_KEY_BYTES or not _KEY.fullmatch(key):
            return "", f"{self._path}: the file has to hold one key of printable ASCII, and nothing else"
        return key.decode(), ""
