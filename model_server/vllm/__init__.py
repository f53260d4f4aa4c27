"""What real vLLM pods need beside vLLM: a checked launch profile, and a cache policy for its offload tier."""
