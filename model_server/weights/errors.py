"""Why a model's files cannot be had; the message says what to do."""

from __future__ import annotations


class WeightsError(Exception):
    """There is no such model, or it cannot be fetched or converted."""
