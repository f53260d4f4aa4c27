"""Routing rules compared in a simulated fleet: `python -m bench.routing --help`."""
