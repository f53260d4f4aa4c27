"""Load tests: locust users against a running gateway, and what their runs came to.

Nothing here imports locust but the locust files and `locust_run`: it patches the standard library of the
process it is imported in. `python -m bench.load` starts it as a process of its own.
"""
