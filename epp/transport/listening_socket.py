"""Opens the socket to listen on. If the address cannot be used, the error says what to do."""

from __future__ import annotations

import contextlib
import errno
import resource
import socket
import stat
from pathlib import Path
from typing import Final

from epp.base.errors import ConfigError
from epp.config.listening import Listen

_MAX_PEERS: Final = 4096
_RESERVED_FILES: Final = 256
"""File descriptors that are not given to connections. They are for scrapes, pages, the API server and other
pickers.
"""
_BACKLOG: Final = 1024


def cannot_listen(address: str, error: OSError) -> ConfigError:
    hint = "is another picker running?" if error.errno == errno.EADDRINUSE else "choose another"
    return ConfigError(f"listen.address: cannot listen on {address}: {error.strerror}; {hint}")


def require_folder(path: Path) -> None:
    """Check the folder of a unix socket. Raises ConfigError if it does not exist."""
    if not path.parent.is_dir():
        raise ConfigError(
            f"listen.address: unix:{path}: the folder {path.parent} does not exist; create it, or correct "
            "the path"
        )


def max_peers() -> int:
    """Return the most connections at once. File descriptors remain for everything else."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _MAX_PEERS
    return max(1, min(_MAX_PEERS, soft - _RESERVED_FILES, max(soft // 2, 1)))


def bound(listen: Listen) -> socket.socket:
    """Return a listening socket. Raises ConfigError with the reason if it cannot listen."""
    if listen.address.startswith("unix:"):
        return _bound_to_path(Path(listen.address.removeprefix("unix:")), mode=int(listen.socket_mode, 8))
    host, _, port = listen.address.rpartition(":")
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server(
            (host, int(port)), family=family, backlog=_BACKLOG, dualstack_ipv6=host == "::"
        )
    except OSError as error:
        raise cannot_listen(listen.address, error) from error


def _bound_to_path(path: Path, *, mode: int) -> socket.socket:
    require_folder(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISSOCK(path.stat().st_mode):
                path.unlink()  # left behind by an earlier process
        sock.bind(str(path))
        # The socket is made under the umask, and often gets the mode 0755. Then a data plane that runs as
        # another user could not connect, and would go on without the picker.
        path.chmod(mode)
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        raise cannot_listen(f"unix:{path}", error) from error
    return sock
