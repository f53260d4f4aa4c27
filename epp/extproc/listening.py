"""What can be wrong with the address to listen on, in words that say what to do."""

from __future__ import annotations

import errno
from pathlib import Path

from epp.errors import ConfigError


def cannot_listen(address: str, error: OSError) -> ConfigError:
    hint = "is another picker running?" if error.errno == errno.EADDRINUSE else "choose another"
    return ConfigError(f"listen.address: cannot listen on {address}: {error.strerror}; {hint}")


def require_folder(path: Path) -> None:
    """ConfigError where the folder of a unix socket is not there."""
    if not path.parent.is_dir():
        raise ConfigError(
            f"listen.address: unix:{path}: there is no folder {path.parent}; make it, or correct the path"
        )
