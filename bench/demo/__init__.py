"""Runs the demonstration that `make run` starts: one workload through the real gateway, by one rule and then
by another.
"""
