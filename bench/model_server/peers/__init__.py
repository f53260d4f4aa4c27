"""Our engine against transformers' continuous batching and vLLM, on the same CPU, model and requests:
`make bench-peers`."""
