"""The table of images. An entry is a program of this machine with the folders that it needs and the image's
defaults, or the root folder of a built image.

A repository that is not in the table cannot be pulled, as in a real cluster.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

REPOSITORY: Final = Path(__file__).parents[3]
NONROOT: Final = 65532


class Image(msgspec.Struct, frozen=True, kw_only=True):
    """One repository of the table."""

    entrypoint: tuple[str, ...]
    command: tuple[str, ...] = ()
    """Its arguments, if the pod names neither command nor args."""
    folders: tuple[str, ...] = ()
    """Folders of this machine that are shown at the same place, read-only."""
    root: str = ""
    """The root folder of a built image. A container then sees only this folder and nothing of this machine.
    Empty: this machine's own root."""
    variables: Mapping[str, str] = {}
    uid: int = NONROOT
    directory: str = "/"


class ImageTable(msgspec.Struct, frozen=True):
    images: Mapping[str, Image]

    def pull(self, name: str) -> Image | None:
        """Return the image by its full name, or None if it cannot be pulled."""
        without_digest = name.partition("@")[0]
        repository, colon, tag = without_digest.rpartition(":")
        if not colon or "/" in tag:
            repository = without_digest
        return self.images.get(repository)


def built_image(root: Path, config: Mapping[str, Any]) -> Image:
    """Return an image that was built. `config` is the image's own configuration, in OCI format."""
    variables = dict(entry.split("=", 1) for entry in config.get("Env", []))
    return Image(
        entrypoint=tuple(config["Entrypoint"]),
        command=tuple(config.get("Cmd") or ()),
        variables=variables,
        uid=int(config["User"].partition(":")[0]),
        directory=config.get("WorkingDir") or "/",
        root=str(root),
    )


def python_image(*program: str) -> Image:
    """Return an image that contains this checkout and its virtual environment, and starts a program of the
    checkout.
    """
    binaries = REPOSITORY / ".venv" / "bin"
    return Image(
        entrypoint=program,
        folders=tuple(dict.fromkeys((str(REPOSITORY), sys.prefix, sys.base_prefix))),
        variables={"PATH": f"{binaries}:{Path(sys.prefix) / 'bin'}:/usr/local/bin:/usr/bin:/bin"},
    )
