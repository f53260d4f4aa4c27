"""Makes all measurements that need an accelerator: `make bench-gpu`. A further run continues where the last
one stopped.
"""
