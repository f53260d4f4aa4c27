"""What can be wrong with a stored prefix.
Callers: those who open a store, and readers, who compute the prefix instead.
"""


class StoreError(Exception):
    """The store cannot be used as asked; the text says what to do."""


class LayoutMismatchError(StoreError):
    """The folder holds KV of another model, type or shape."""


class DamagedSegmentError(StoreError):
    """A segment is shorter than it says, or its bytes are not those that were written."""
