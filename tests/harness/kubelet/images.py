"""What stands for container images: a program of this machine, the folders it needs, and the image's defaults.

A repository that the table does not have, or a tag that it does not list, cannot be pulled, as in a real cluster.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

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
    variables: Mapping[str, str] = {}
    uid: int = NONROOT
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


def python_image(*program: str, tags: tuple[str, ...] = ()) -> Image:
    """An image that has this checkout and its virtual environment, and starts a program of it."""
    binaries = REPOSITORY / ".venv" / "bin"
    return Image(
        entrypoint=program,
        folders=tuple(dict.fromkeys((str(REPOSITORY), sys.prefix, sys.base_prefix))),
        variables={"PATH": f"{binaries}:{Path(sys.prefix) / 'bin'}:/usr/local/bin:/usr/bin:/bin"},
        tags=tags,
    )
