"""The errors of a stored prefix. Callers: the code that opens a store, and readers, which compute the prefix
instead.
"""


class StoreError(Exception):
    """The store cannot be used in this way. The text says what to do."""


class LayoutMismatchError(StoreError):
    """The folder holds KV of another model, type or shape."""


class DamagedSegmentError(StoreError):
    """A segment's file is shorter than its description says, or its bytes were changed."""
