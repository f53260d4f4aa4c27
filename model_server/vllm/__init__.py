"""The path of release 0.2.0 for vLLM's `cache_policy_module_path`. It goes with the next release."""
