"""Runners: they turn a step's plan into tokens."""
