"""Row 001-7 on real servers: Poisson arrivals over HTTP at our engine and at vLLM on the CPU,
with the block cache and without."""
