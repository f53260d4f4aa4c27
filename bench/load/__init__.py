"""Runs load tests: locust users against a running gateway, and the reports of their runs.

Only the locust files and `locust_run` import locust, because it patches the standard library of its process.
`python -m bench.load` starts locust as a process of its own.
"""
