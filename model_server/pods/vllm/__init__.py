"""A cache policy for the offload tier of real vLLM pods."""
