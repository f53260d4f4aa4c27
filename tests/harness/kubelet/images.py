"""What stands for container images: a program of this machine, the folders it needs,
and the image's defaults; or the root folder of an image that was built.

A repository that the table does not have, or a tag that it does not list, cannot be pulled,
as in a real cluster.
"""

from __future__ import annotations

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
    """Arguments, where the pod names neither command nor args."""
    folders: tuple[str, ...] = ()
    """Folders of this machine that are shown at the same place, read-only."""
    root: str = ""
    """The root folder of a built image, of which a container sees that and nothing of this machine;
    empty: this machine's own."""
    variables: Mapping[str, str] = {}
    uid: int = NONROOT
    directory: str = "/"
    tags: tuple[str, ...] = ()
    """The tags that can be pulled; empty: all."""


class ImageTable(msgspec.Struct, frozen=True):
    images: Mapping[str, Image]

    def pull(self, name: str) -> Image | None:
        """The image by its full name; None where it cannot be pulled."""
        without_digest = name.partition("@")[0]
        repository, colon, tag = without_digest.rpartition(":")
        if not colon or "/" in tag:
            repository, tag = without_digest, "latest"
        image = self.images.get(repository)
        return image if image is not None and (not image.tags or tag in image.tags) else None


def built_image(root: Path, config: Mapping[str, Any]) -> Image:
    """An image that was built: `config` is its own, as the OCI format has it."""
    variables = dict(entry.split("=", 1) for entry in config.get("Env", []))
    return Image(
        entrypoint=tuple(config["Entrypoint"]),
        command=tuple(config.get("Cmd") or ()),
        variables=variables,
        uid=int(config["User"].partition(":")[0]),
        directory=config.get("WorkingDir") or "/",
        root=str(root),
    )


def python_image(*program: str, tags: tuple[str, ...] = ()) -> Image:
    """An image that has this checkout and its virtual environment, and starts a program of it."""
    binaries = REPOSITORY / ".venv" / "bin"
    return Image(
        entrypoint=program,
        folders=tuple(dict.fromkeys((str(REPOSITORY), sys.prefix, sys.base_prefix))),
        variables={"PATH": f"{binaries}:{Path(sys.prefix) / 'bin'}:/usr/local/bin:/usr/bin:/bin"},
        tags=tags,
    )
