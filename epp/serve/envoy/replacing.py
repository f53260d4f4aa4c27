"""Writes whole files for Envoy: a reader sees the old text or the new one, never a part.

Envoy follows renames, so each change is a new file renamed into place. `eds` and `sds` call this module.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_if_changed(path: Path, text: bytes) -> bool:
    """Make the file contain `text`. Return False if it already did. Raise OSError if it cannot be written.
    The text is compared with the current content of the file, so a change by another program is overwritten.
    """
    try:
        if path.read_bytes() == text:
            return False
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
    _replace(path, text)
    return True


def _replace(path: Path, text: bytes) -> None:
    # The new file is in the same directory, because a rename across file systems copies, and Envoy could read
    # a half copy.
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(file.fileno(), 0o644)  # Envoy may run as another user
            file.write(text)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
