"""Reads a Dockerfile: its stages, what they copy from the repository, and what .dockerignore hides from them.

Knows what deploy/docker uses: ARG, FROM, ENV, WORKDIR, COPY, RUN, USER, LABEL, EXPOSE, ENTRYPOINT, CMD.
"""

import re
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Final

REPOSITORY: Final = Path(__file__).parents[2]
FOLDER: Final = REPOSITORY / "deploy" / "docker"
_KNOWN: Final = {"FROM", "ENV", "WORKDIR", "COPY", "RUN", "USER", "LABEL", "EXPOSE", "ENTRYPOINT", "CMD"}


@dataclass(slots=True)
class Stage:
    image: str
    """Its base. A base that is an ARG has the default of the ARG."""
    name: str = ""
    steps: list[tuple[str, str]] = field(default_factory=list)
    """The instructions, each with the rest of its line."""

    def all(self, instruction: str) -> list[str]:
        return [rest for found, rest in self.steps if found == instruction]


def read(path: Path) -> list[Stage]:
    """Return the stages of a Dockerfile. Raise AssertionError on an instruction that this module does not
    know.
    """
    stages: list[Stage] = []
    arguments: dict[str, str] = {}
    for line in path.read_text().replace("\\\n", " ").splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        instruction, _, rest = line.partition(" ")
        if instruction == "ARG" and not stages:
            name, _, default = rest.partition("=")
            arguments[name] = default
            continue
        assert instruction in _KNOWN, f"{path.name}: {instruction}"
        if instruction == "FROM":
            image, *named = re.split(r"\s+AS\s+", rest)
            base = re.sub(r"\$\{(\w+)\}", lambda found: arguments[found[1]], image.strip())
            stages.append(Stage(image=base, name="".join(named)))
        else:
            stages[-1].steps.append((instruction, rest.strip()))
    return stages


def sources(stage: Stage) -> list[tuple[list[str], str]]:
    """Return what the stage copies from the build's context, and where to."""
    copies = [shlex.split(rest) for rest in stage.all("COPY") if not rest.startswith("--from")]
    return [(words[:-1], words[-1]) for words in copies]


def context_files(path: Path) -> Sequence[Path]:
    """Return the Dockerfile and every file of the repository that it copies. The files are tracked, or new
    and not ignored by git.
    """
    wanted = sorted({file for stage in read(path) for files, _ in sources(stage) for file in files})
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", *wanted],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    found = (REPOSITORY / name for name in sorted(set(listed.split("\0")) - {""}))
    return [path, *(file for file in found if file.is_file())]


def ignored(path: str) -> str:
    """Return the line of .dockerignore that hides `path` or a folder above it. The line is empty if none
    does.
    """
    lines = [
        line for line in (REPOSITORY / ".dockerignore").read_text().splitlines() if line and line[0] != "#"
    ]
    parts = PurePosixPath(path).parts
    for line in lines:
        pattern = line.removeprefix("**/")
        if any(fnmatch("/".join(parts[:end]), pattern) for end in range(1, len(parts) + 1)):
            return line
        if line.startswith("**/") and any(fnmatch(part, pattern) for part in parts):
            return line
    return ""
