"""Compares our engine with transformers' continuous batching and vLLM, on the same CPU, model and requests:
`make bench-peers`.
"""
