"""Runs the picker's rules before real vLLM servers on the real clock, and the same requests on the virtual
clock.
"""
