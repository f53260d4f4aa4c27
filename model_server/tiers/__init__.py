"""Prefix KV beyond GPU memory: a probe finds the important tokens, they are read in dense chunks, and chunks
are kept by their use and importance.
"""
