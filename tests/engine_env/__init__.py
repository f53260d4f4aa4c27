"""A Python with torch and transformers for the engine:
what `prefix-gateway[engine]` installs, without CUDA, cached.

`python -m tests.engine_env build` prepares it; `tests/engine` and `make run MODEL=...` run in it.
Nothing in `epp` or `model_server` imports this package.
"""
