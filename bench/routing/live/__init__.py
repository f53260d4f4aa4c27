"""Runs the same requests by the same rules live and simulated: with real processes on the real clock, and on
the virtual clock.
"""
