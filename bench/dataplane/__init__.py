"""Measures what a request costs in CPU and in time on its way through Envoy and the picker: `make
bench-dataplane`.

Real processes take part: Envoy, `epp serve`, a bare grpc.aio server as the floor, and model servers that
answer with fixed bytes. All variants run in one process tree and take turns, so that a noisy machine affects
all of them alike.
"""
