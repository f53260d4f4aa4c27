"""Benchmarks of the engine with a real model; they run where torch is: `make bench-engine`."""
