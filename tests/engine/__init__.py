"""Tests of code that computes with torch. They run in the environment of `tests.engine_env`, by `make
test-engine`.
"""
