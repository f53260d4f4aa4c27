"""The runner that computes any decoder of the transformers library over the engine's blocks. It needs the
extra `engine`.
"""
