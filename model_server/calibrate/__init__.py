"""Fits the cost model to a real server: the probes, the fit of their times, and the file with the result."""
