"""buildah as the tests use it. It has its own storage in the cache folder and no daemon. Only pip and
Debian's package manager use the network.

Builds get the machine's pip configuration (an index, certificates) as a mounted file, so that no part of it
gets into an image. Called by `environment`.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from tests.harness.cached_builds import BuildFailedError, run

PACKAGES: Final = ("buildah", "mmdebstrap", "docker-registry")
_PIP_FILE: Final = "/etc/pip.conf"
_PATHS: Final = ("cert", "client-cert", "find-links")
"""The settings of pip that name files of this machine."""


class Engine:
    """buildah over the storage in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        driver = "overlay" if os.geteuid() == 0 else "vfs"
        self.command: Final = (
            "buildah",
            *(
                "--root",
                str(folder / "storage"),
                "--runroot",
                str(folder / "run"),
                "--storage-driver",
                driver,
            ),
        )
        """The command, in the form that the Makefile's ENGINE has."""

    def import_base(self, tarball: Path, name: str) -> None:
        """Import an image of one layer, unless it exists."""
        if self._output("images", "--quiet", "--filter", f"reference={name}"):
            return
        container = self._output("from", "scratch")
        run(*self.command, "add", "--quiet", container, tarball, "/")
        run(*self.command, "commit", "--quiet", "--rm", container, name)

    def build_flags(self) -> Sequence[str]:
        """Return the flags that a build needs on this machine: isolation without a daemon, the network, and
        pip's configuration.
        """
        mounts = [*self._pip_mounts(), (Path("/etc/resolv.conf"), "/etc/resolv.conf")]
        return (
            *("--layers", "--isolation", "chroot", "--network", "host", "--pull-never"),
            *(word for source, target in mounts for word in ("--volume", f"{source}:{target}:ro")),
        )

    @contextmanager
    def container(self, image: str) -> Iterator[tuple[str, Path]]:
        """Make a container of an image, and yield its root folder."""
        name = self._output("from", "--pull-never", image)
        try:
            yield name, Path(self._output("mount", name))
        finally:
            run(*self.command, "rm", name)

    def run_in(self, container: str, *words: str, mounts: Sequence[tuple[Path, str]] = ()) -> str:
        """Run a command in a container as the image's user. Return its output."""
        volumes = [w for source, target in mounts for w in ("--volume", f"{source}:{target}:ro")]
        return self._output("run", "--isolation", "chroot", *volumes, container, "--", *words)

    def config(self, image: str) -> dict[str, Any]:
        """Return the image's own settings: Entrypoint, Cmd, Env, User."""
        found: dict[str, Any] = json.loads(self._output("inspect", "--type", "image", image))
        config: dict[str, Any] = found["OCIv1"]["config"]
        return config

    def _pip_mounts(self) -> list[tuple[Path, str]]:
        settings = pip_settings()
        file = self._folder / "pip.conf"
        file.write_text("[global]\n" + "".join(f"{name} = {value}\n" for name, value in settings.items()))
        named = [Path(settings[name]) for name in _PATHS if name in settings]
        return [(file, _PIP_FILE), *((path, str(path)) for path in named if path.exists())]

    def _output(self, *words: str) -> str:
        done = subprocess.run([*self.command, *words], check=False, stdout=subprocess.PIPE, text=True)
        if done.returncode:
            raise BuildFailedError(f"buildah {' '.join(words)} ended with status {done.returncode}")
        return done.stdout.strip()


def pip_settings() -> dict[str, str]:
    """Return the settings that pip on this machine reads from its files and from variables. Variables win.
    Settings of single commands are left out.
    """
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], check=True, capture_output=True, text=True
    ).stdout
    rows = re.findall(r"^(global|:env:)\.([\w-]+)='(.*)'$", listed, re.MULTILINE)
    return {name: value for section in ("global", ":env:") for found, name, value in rows if found == section}


def require_packages(progress: Any) -> None:
    """Install the engine's Debian packages that are missing. If this is not possible, raise BuildFailedError
    with advice.
    """
    missing = [name for name in PACKAGES if shutil.which(name) is None]
    if not missing:
        return
    by_hand = f"install them: apt-get install --no-install-recommends {' '.join(missing)}"
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise BuildFailedError(
            f"the images' tests need {' and '.join(missing)}, as root, on Debian; {by_hand}"
        )
    progress(f"installing {' and '.join(missing)} with apt-get")
    try:
        run("apt-get", "update", "--quiet")
        run(
            *("apt-get", "install", "--yes", "--quiet", "--no-install-recommends", *missing),
            env={"DEBIAN_FRONTEND": "noninteractive"},
        )
    except BuildFailedError as error:
        raise BuildFailedError(f"{error}; {by_hand}") from error
