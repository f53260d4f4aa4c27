"""An experiment (docs/tiers.md): keeps the KV of prefixes beyond GPU memory. A probe finds the tokens of a
prefix that matter, requests read these in dense chunks, and fast tiers keep chunks by their use and
importance.
"""
