"""The errors of one pass: a file that cannot be used, or a server that refuses or does not answer."""

from __future__ import annotations


class SyncError(Exception):
    """The message is shown in the status and on stderr."""


class AdapterFileError(SyncError):
    """The file with the wanted adapters is missing or malformed."""


class ServerError(SyncError):
    """The server cannot be reached, or refused the request."""
