"""Reads a Dockerfile, and runs its build stage without a container: the same commands, over a folder that stands for `/`.

Knows what deploy/docker uses: FROM, ENV, WORKDIR, COPY, RUN, USER, LABEL, EXPOSE, ENTRYPOINT, CMD.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Final

from tests.charts.rendering import REPOSITORY

FOLDER: Final = REPOSITORY / "deploy" / "docker"
_KNOWN: Final = {"FROM", "ENV", "WORKDIR", "COPY", "RUN", "USER", "LABEL", "EXPOSE", "ENTRYPOINT", "CMD"}


@dataclass(slots=True)
class Stage:
    image: str
    name: str = ""
    steps: list[tuple[str, str]] = field(default_factory=list)
    """Instruction and the rest of its line."""

    def all(self, instruction: str) -> list[str]:
        return [rest for found, rest in self.steps if found == instruction]


def read(path: Path) -> list[Stage]:
    """Its stages. AssertionError on an instruction that is not known here."""
    stages: list[Stage] = []
    for line in path.read_text().replace("\\\n", " ").splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        instruction, _, rest = line.partition(" ")
        assert instruction in _KNOWN, f"{path.name}: {instruction}"
        if instruction == "FROM":
            image, *name = re.split(r"\s+AS\s+", rest)
            stages.append(Stage(image=image.strip(), name="".join(name)))
        else:
            stages[-1].steps.append((instruction, rest.strip()))
    return stages


def sources(stage: Stage) -> list[tuple[list[str], str]]:
    """What it copies from the build's context, and where to."""
    copies = [shlex.split(rest) for rest in stage.all("COPY") if not rest.startswith("--from")]
    return [(words[:-1], words[-1]) for words in copies]


def ignored(path: str) -> str:
    """The line of .dockerignore that hides `path` or a folder above it; empty: none."""
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


def run_build_stage(stage: Stage, root: Path) -> None:
    """Its steps, with `root` for `/` where the build makes folders. CalledProcessError holds what a command said."""
    quick = {"PIP_NO_COMPILE": "1"}
    environment = {**os.environ, **quick, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    directory = root
    for instruction, rest in stage.steps:
        here = _moved(rest, root)
        match instruction:
            case "ENV":
                for word in shlex.split(here):
                    name, _, value = word.partition("=")
                    if name != "PIP_NO_CACHE_DIR":  # here the cache is worth a minute
                        environment[name] = value.replace("$PATH", environment["PATH"])
            case "WORKDIR":
                directory = Path(here)
                directory.mkdir(parents=True)
            case "COPY":
                *files, target = shlex.split(here)
                for file in files:
                    _copy(REPOSITORY / file, directory / target, into=target.endswith("/"))
            case "RUN":
                subprocess.run(
                    ["sh", "-ec", here],
                    cwd=directory,
                    env=environment,
                    check=True,
                    capture_output=True,
                    text=True,
                )
            case _:
                raise AssertionError(f"{instruction} in a build stage")


def _moved(text: str, root: Path) -> str:
    return re.sub(r"(?<![\w.])(/opt|/src)\b", lambda found: f"{root}{found[1]}", text)


def _copy(source: Path, target: Path, *, into: bool) -> None:
    place = target / source.name if into else target
    place.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, place, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        shutil.copyfile(source, place)
