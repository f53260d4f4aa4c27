"""Finds the files of a model: in a given folder, or from a small model that is fetched and converted once. An
import of this package does not import torch.
"""
