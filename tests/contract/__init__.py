"""The facts on which both sides of the wire rely: recordings of a real vLLM under `data/`, and the rules read
from them.
"""
