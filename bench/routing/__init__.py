"""Compares routing rules in a simulated fleet: `python -m bench.routing --help`."""
