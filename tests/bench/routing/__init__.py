"""Routing rules compared in a simulated fleet: `python -m tests.bench.routing --help`."""
