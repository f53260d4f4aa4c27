"""Measures the engine with a real model: `make bench-engine`. These benchmarks need torch."""
