"""`make bench-gpu` makes all measurements that need an accelerator. A further run continues where the last
one stopped.
"""
