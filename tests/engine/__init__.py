"""Tests of what computes with torch: they run in the environment of `tests.engine_env`,
by `make test-engine`."""
