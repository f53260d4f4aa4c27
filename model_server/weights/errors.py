"""The error for a model whose files cannot be found or fetched. The message says what to do."""

from __future__ import annotations


class WeightsError(Exception):
    """There is no such model, or it cannot be fetched or converted."""
