"""`python -m tests.compiled_env build|run`: the picker as its image runs it, with its hot path compiled by
mypyc. As for the image, pip builds it from a copy of the checkout. The result is a folder of the user's
cache that holds the package `epp` and nothing else. A change of any file of `epp`, or of the compiler's
settings, makes a new folder. The checkout itself stays plain Python. A Python process that inherits
`variables` imports the compiled package, and everything else from the checkout. `tests.suite` and
`bench.dataplane` call this module.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from tests.harness.build_command import build_and_tell, exit_status, sayer
from tests.harness.cached_builds import (
    built_elsewhere,
    cache_folder,
    content_key,
    only_builder,
    remove_unfinished,
    run,
)

_REPOSITORY: Final = Path(__file__).parents[1]
_DECIDING: Final = ("setup.py", "pyproject.toml", "README.md", "requirements/compile.txt")
_KEPT: Final = 4
"""The number of folders that are kept: this folder, and the youngest folders of other states and
checkouts.
"""
_SHOW: Final = "import sys, epp.picker.picker, epp.serve.process; sys.exit(not epp.serve.process.compiled())"

_say = sayer("compiled-env")


def locate() -> Path:
    """Return the place of this checkout's compiled package, whether it exists or not."""
    files = [_REPOSITORY / name for name in _DECIDING] + _sources()
    contents = [part for f in files for part in (str(f.relative_to(_REPOSITORY)).encode(), f.read_bytes())]
    python = f"{sys.implementation.cache_tag} {platform.machine()}".encode()
    return cache_folder() / f"compiled-{content_key(python, *contents)}"


def _sources() -> list[Path]:
    left_out = {".pyc", ".so"}
    found = (_REPOSITORY / "epp").rglob("*")
    return sorted(path for path in found if path.is_file() and path.suffix not in left_out)


def build(*, progress: Callable[[str], None]) -> Path:
    """Return the folder. Build it first if it is missing, which takes some two minutes of one core. Raise
    BuildFailedError if the build fails.
    """
    final = locate()
    if not final.is_dir():
        with only_builder("compiled", progress=progress):
            remove_unfinished(("compiled",), progress=progress)
            if not final.is_dir():
                progress("compiling the picker's hot path: some two minutes")
                with built_elsewhere(final) as folder, tempfile.TemporaryDirectory() as copy:
                    _install(Path(copy), folder)
                _forget_older(final)
    os.utime(final)
    return final


def _install(copy: Path, folder: Path) -> None:
    for path in [*(_REPOSITORY / name for name in _DECIDING), *_sources()]:
        place = copy / path.relative_to(_REPOSITORY)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, place)
    run(
        *(sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"),
        *("--no-deps", "--no-build-isolation", "--no-index", "--target", folder, copy),
        env={"PREFIX_GATEWAY_COMPILE": "1"},
    )
    run(sys.executable, "-c", _SHOW, env=variables(folder))


def variables(folder: Path) -> Mapping[str, str]:
    """Return the environment in which Python imports `epp` from `folder` and everything else from this
    checkout.
    """
    return {"PYTHONSAFEPATH": "1", "PYTHONPATH": f"{folder}{os.pathsep}{_REPOSITORY}"}


def _forget_older(final: Path) -> None:
    others = [folder for folder in final.parent.glob("compiled-*") if folder.is_dir() and folder != final]
    for folder in sorted(others, key=lambda f: f.stat().st_mtime, reverse=True)[_KEPT - 1 :]:
        shutil.rmtree(folder, ignore_errors=True)


def _build() -> None:
    folder = locate()
    build_and_tell(folder, ready=folder.is_dir(), build=lambda: build(progress=_say), say=_say)


def _become_python(module: str, arguments: list[str]) -> None:
    folder = build(progress=_say)
    words = [sys.executable, "-m", module, *arguments]
    os.execve(sys.executable, words, {**os.environ, **variables(folder)})


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.compiled_env", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("build", help="build the cached package unless it exists")
    command = commands.add_parser(
        "run", help="run a module with the compiled package: run epp serve --config epp.yaml"
    )
    command.add_argument("module")
    command.add_argument("arguments", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    chosen = _build if args.command == "build" else lambda: _become_python(args.module, args.arguments)
    return exit_status("compiled-env", chosen)


if __name__ == "__main__":
    sys.exit(main())
