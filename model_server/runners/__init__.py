"""Runners turn a step's plan into tokens."""
