"""Additions for real vLLM pods: a checked launch profile, and a cache policy for vLLM's offload tier."""
