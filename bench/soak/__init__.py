"""Runs the whole gateway under a mixed load for minutes or hours: nothing may fail, nothing may grow, and
nothing may stay booked at the end.
"""
