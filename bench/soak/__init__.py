"""Runs the whole gateway under a mixed load for minutes or hours. No request may fail, no memory may grow,
and no booking may be left at the end.
"""
