"""A real Kubernetes control plane for the tests: its binaries, kubectl and helm, and the code that starts and
stops it.

`python -m tests.environments cluster build` prepares what `tests.cluster_env.fixtures` starts.
Nothing in `epp` or `model_server` imports this package.
"""
