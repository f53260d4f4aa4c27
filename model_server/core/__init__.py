"""The engine without torch, sockets or a clock: hashing, blocks, the KV cache manager, the scheduler, the
step.
"""
