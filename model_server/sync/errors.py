"""What can go wrong around one pass: a file that cannot be used, or a server that refuses or is not there."""

from __future__ import annotations


class SyncError(Exception):
    """The message is shown in the status and on stderr."""


class AdapterFileError(SyncError):
    """The file with the wanted adapters is missing or not what it should be."""


class ServerError(SyncError):
    """The server cannot be reached, or refused what was asked."""
