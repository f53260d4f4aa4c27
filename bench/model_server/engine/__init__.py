"""Benchmarks of the engine with a real model. They need torch: `make bench-engine`."""
