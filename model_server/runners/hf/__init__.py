"""The runner that computes: any decoder of the transformers library, over the engine's blocks.
Needs the extra `engine`.
"""
