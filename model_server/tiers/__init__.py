"""Prefix KV beyond GPU memory: what matters of it is found by a probe, read in dense chunks,
and kept by importance.
"""
