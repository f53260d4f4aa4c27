"""`make bench-dataplane`: what a request costs in CPU and in time on the way through Envoy and the picker.

Real processes: Envoy, `epp serve`, a bare grpc.aio server as the floor, and model servers that answer with
canned bytes. All variants run in one process tree and take turns, so that a noisy machine is noisy for each
of them.
"""
