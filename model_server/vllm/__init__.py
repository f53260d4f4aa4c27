"""What real vLLM pods need beside vLLM: a checked launch profile."""
