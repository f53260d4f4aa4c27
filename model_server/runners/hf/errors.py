"""The errors of a model that cannot be served. The messages say what to do."""


class ModelError(Exception):
    """The model cannot be served."""


class UnsupportedModelError(ModelError):
    """The runner would compute this model wrongly."""
