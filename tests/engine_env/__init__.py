"""A cached Python with torch and transformers for the engine. It has the packages that
`prefix-gateway[engine]` installs, without CUDA.

`python -m tests.engine_env build` prepares it. `tests/engine` and `make run MODEL=...` run in it.
Nothing in `epp` or `model_server` imports this package.
"""
