"""The error of a package in Rust."""


class Panic(BaseException):
    """A panic as pyo3 raises it: not an Exception."""
