"""A cached Python with the packages of clients. `make clients-env` prepares it."""

from __future__ import annotations

from tests.harness.cached_builds import Progress, lock_requirements, say
from tests.vllm_env.environment import REQUIREMENTS, PythonEnvironment

LOCK_FILE = REQUIREMENTS / "clients.txt"


def require() -> PythonEnvironment:
    environment = PythonEnvironment.of("clients", LOCK_FILE)
    return environment.required("the environment of clients is", command="make clients-env")


def build(*, progress: Progress = say) -> None:
    smoke_test = "import anthropic, langchain_openai, openai; print('openai', openai.__version__, 'works')"
    environment = PythonEnvironment.of("clients", LOCK_FILE)
    environment.installed("clients", LOCK_FILE, smoke_test=smoke_test, progress=progress)


def lock() -> None:
    """Write requirements/clients.txt anew."""
    lock_requirements(LOCK_FILE, "--group", f"{REQUIREMENTS.parent / 'pyproject.toml'}:clients")
