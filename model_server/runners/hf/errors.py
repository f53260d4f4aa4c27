"""What can be wrong with a model that somebody wants served. The messages say what to do."""

from __future__ import annotations


class ModelError(Exception):
    """The model cannot be served."""


class AdapterError(Exception):
    """The LoRA adapter cannot be served with this model."""


class UnsupportedModelError(ModelError):
    """It would be computed wrongly here."""
