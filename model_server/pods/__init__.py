"""Tools for pods that run vLLM: a cache policy for vLLM's offload tier, and a sidecar for LoRA
adapters. The server of this repository does not need them.
"""
