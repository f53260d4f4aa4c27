"""Keeps the KV of prefixes beyond GPU memory. A probe finds a prefix's important tokens, requests read these
in dense chunks, and the fast tiers keep chunks by their use and importance.
"""
