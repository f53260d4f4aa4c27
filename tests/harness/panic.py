"""The error of a package in Rust."""

from __future__ import annotations


class Panic(BaseException):
    """A panic as pyo3 raises it: not an Exception."""
