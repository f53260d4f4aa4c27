"""The errors of a model that cannot be served. The messages say what to do."""

from __future__ import annotations


class ModelError(Exception):
    """The model cannot be served."""


class UnsupportedModelError(ModelError):
    """The runner would compute this model wrongly."""
