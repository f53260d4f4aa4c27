"""Whole files for Envoy: a reader sees the old text or the new one, never a part.

Envoy follows renames, so each change is a new file renamed into place. Called by `eds` and `sds`.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_if_changed(path: Path, text: bytes) -> bool:
    """Make the file say `text`; False when it already did. OSError when it cannot be written.

    What counts is the file as it is, not what was last written: another hand's change is put right.
    """
    try:
        if path.read_bytes() == text:
            return False
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
    _replace(path, text)
    return True


def _replace(path: Path, text: bytes) -> None:
    # In the same directory: a rename across file systems would be a copy, which Envoy could read half.
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(file.fileno(), 0o644)  # Envoy may run as another user
            file.write(text)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
