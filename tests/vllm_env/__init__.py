"""A real vLLM on the CPU for the tests: its environment, a tiny model, and servers to start and kill.

`python -m tests.environments vllm build` prepares what `tests.vllm_env.fixtures` starts.
Nothing in `epp` or `model_server` imports this package.
"""
