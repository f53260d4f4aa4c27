"""Fits the cost model to a real server:
what to ask, what to make of its times, and the file that keeps it.
"""
