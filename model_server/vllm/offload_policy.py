"""The old name of `model_server.pods.vllm.offload_policy.UsesCachePolicy`."""

from model_server.pods.vllm.offload_policy import UsesCachePolicy as ImportanceCachePolicy

__all__ = ["ImportanceCachePolicy"]
