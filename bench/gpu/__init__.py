"""`make bench-gpu`: the measurements that need an accelerator, in one command. A further run continues where
the last one stopped.
"""
