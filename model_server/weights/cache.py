"""Makes folders under the user's cache, each only once. A process takes a lock, makes the folder under
another name, and renames the folder when it is complete.

So a folder under its final name is complete. The name contains all inputs that decide the folder's content.
Each process removes the remains of killed processes. The lock is flock, so this module runs on Linux and
other POSIX systems.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_UNFINISHED = ".making-"


class WeightsError(Exception):
    """There is no such model, or it cannot be fetched or converted. The message says what to do."""


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "prefix-gateway"


def made_once(name: str, make: Callable[[Path], None]) -> Path:
    """Return the folder of this name. If the folder does not exist, `make` fills it, and other processes that
    need the folder wait.
    """
    folder = cache_folder() / name
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.with_name(f"{folder.name}.lock")):
        if not folder.is_dir():
            for left_behind in folder.parent.glob(f"{folder.name}{_UNFINISHED}*"):
                shutil.rmtree(left_behind)
            unfinished = Path(tempfile.mkdtemp(prefix=f"{folder.name}{_UNFINISHED}", dir=folder.parent))
            try:
                make(unfinished)
                unfinished.chmod(0o755)
                unfinished.rename(folder)
            except BaseException:
                shutil.rmtree(unfinished, ignore_errors=True)
                raise
    return folder


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
