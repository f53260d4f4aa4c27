"""The tests are a package, so that they can import `tests.vllm_env`."""
