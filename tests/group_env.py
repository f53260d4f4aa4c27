"""Cached Pythons, each with the packages of one dependency group of pyproject.toml. `make clients-env` and
`make rivals-env` prepare them.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.harness.cached_builds import Progress, lock_requirements, say
from tests.vllm_env.environment import REQUIREMENTS, PythonEnvironment


@dataclass(frozen=True, slots=True)
class Group:
    name: str
    smoke_test: str
    """Python code that ends with an error if the packages do not work."""

    @property
    def lock_file(self) -> Path:
        return REQUIREMENTS / f"{self.name}.txt"

    def require(self) -> PythonEnvironment:
        environment = PythonEnvironment.of(self.name, self.lock_file)
        return environment.required(f"the environment of {self.name} is", command=f"make {self.name}-env")

    def build(self, *, progress: Progress = say) -> None:
        environment = PythonEnvironment.of(self.name, self.lock_file)
        environment.installed(self.name, self.lock_file, smoke_test=self.smoke_test, progress=progress)

    def lock(self) -> None:
        """Write the requirement file anew."""
        lock_requirements(self.lock_file, "--group", f"{REQUIREMENTS.parent / 'pyproject.toml'}:{self.name}")


CLIENTS: Final = Group(
    "clients", "import anthropic, langchain_openai, openai; print('openai', openai.__version__, 'works')"
)
RIVALS: Final = Group("rivals", "import sglang_router, vllm_router; print('two other routers work')")
