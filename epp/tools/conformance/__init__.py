"""Checks whether a picker follows the endpoint picker protocol as each gateway speaks it: `python -m
epp.tools.conformance --help`.

This is a separate tool. It needs only the address of a picker, so it works with any picker. No module of the
picker imports it.
"""
