"""Simulates an autoscaler that follows the picker's signal, to see how many model servers a pool gets
(docs/autoscaling.md).
"""
