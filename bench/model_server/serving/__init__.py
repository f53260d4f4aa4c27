"""Measures row 001-7 on real servers: sends Poisson arrivals over HTTP to our engine and to vLLM on the CPU,
with the block cache and without.
"""
