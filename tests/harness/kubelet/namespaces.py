"""Network namespaces and the links between them, by the kernel's own calls and `ip`.

A socket belongs for life to the namespace in which its thread was when it was made. So a thread that entered
a namespace can make sockets for an event loop that never entered it. Called by the kubelet and by tests that
talk to pods.
"""

import asyncio
import contextlib
import ctypes
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from socket import AF_INET, SO_REUSEADDR, SOCK_STREAM, SOL_SOCKET
from socket import socket as Socket  # noqa: N812 - `socket` is a method here
from typing import Any, Final

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]

_NEW_NETWORK: Final = 0x40000000
_THIS_NETWORK: Final = "/proc/thread-self/ns/net"


class NetworkNamespace:
    """A namespace that lives as long as this object or anything in it, and a thread that has entered it."""

    def __init__(self, *, existing: Path | None = None) -> None:
        """Make a new namespace, or enter the one that `existing` (a file of /proc) names."""
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="network-namespace")
        self.fd: Final = self._thread.submit(_enter, existing).result()

    def socket(self, family: int = AF_INET, kind: int = SOCK_STREAM) -> Socket:
        """Return a socket in the namespace that does not block."""
        made = self._thread.submit(Socket, family, kind).result()
        made.setblocking(False)
        return made

    def listen(self, host: str, port: int) -> Socket:
        """Return a listening socket in the namespace."""
        made = self.socket()
        try:
            made.setsockopt(SOL_SOCKET, SO_REUSEADDR, 1)
            made.bind((host, port))
            made.listen(1024)
        except OSError:
            made.close()
            raise
        return made

    async def connect(self, host: str, port: int, **options: Any) -> Connection:
        """Open a connection from inside the namespace, with options of `asyncio.open_connection`."""
        made = self.socket()
        try:
            await asyncio.get_running_loop().sock_connect(made, (host, port))
            return await asyncio.open_connection(sock=made, **options)
        except BaseException:
            made.close()
            raise

    def ip(self, *commands: str) -> None:
        """Run commands of `ip` in the namespace. A command that fails is an error."""
        finished = subprocess.run(
            ["nsenter", f"--net=/proc/self/fd/{self.fd}", "ip", "-batch", "-"],
            input="".join(f"{command}\n" for command in commands).encode(),
            check=False,
            capture_output=True,
            pass_fds=(self.fd,),
        )
        if finished.returncode:
            raise OSError(f"ip: {finished.stderr.decode().strip()} of {commands}")

    def set(self, name: str, value: str) -> None:
        """Write a kernel setting of the namespace, such as net/ipv4/ip_forward."""
        self._thread.submit(Path("/proc/sys", name).write_text, value).result()

    def close(self) -> None:
        """Release the namespace. Its sockets and processes keep it alive."""
        with contextlib.suppress(OSError):
            os.close(self.fd)
        self._thread.shutdown()


def make_bridge(node: NetworkNamespace, name: str, *, address: str) -> None:
    """Make the node's bridge, at an address of a network of 16 bits.

    Without a hardware address of its own a bridge has the lowest of its ports, which changes when a pod comes
    or goes. Pods that send to the former one then reach nobody for up to a minute.
    """
    node.ip(
        "link set lo up",
        f"link add {name} address {_hardware(address)} type bridge",
        f"address add {address}/16 dev {name}",
        f"link set {name} up",
    )


def link(node: NetworkNamespace, pod: NetworkNamespace, *, address: str, bridge: str) -> None:
    """Connect the pod's namespace to the node's bridge, at an address of its network of 16 bits."""
    inherited, name = f"/proc/{os.getpid()}/fd/{pod.fd}", _name(address)
    # A later pod at this address has the same hardware address, so that no neighbour looks for the old one.
    node.ip(
        f"link add {name} type veth peer name eth0 address {_hardware(address)} netns {inherited}",
        f"link set {name} master {bridge}",
        f"link set {name} up",
    )
    pod.ip("link set lo up", f"address add {address}/16 dev eth0", "link set eth0 up")


def unlink(node: NetworkNamespace, address: str) -> None:
    with contextlib.suppress(OSError):  # the kernel may have removed it with the pod's namespace
        node.ip(f"link delete {_name(address)}")


def _hardware(address: str) -> str:
    return ":".join(f"{part:02x}" for part in (2, 0, *map(int, address.split("."))))


def _name(address: str) -> str:
    """Return the name of the node's end of the link."""
    return f"pod-{address.partition('.')[2].partition('.')[2]}"


def _enter(existing: Path | None) -> int:
    library = ctypes.CDLL(None, use_errno=True)
    if existing is None:
        result = library.unshare(_NEW_NETWORK)
    else:
        fd = os.open(existing, os.O_RDONLY)
        result = library.setns(fd, _NEW_NETWORK)
        os.close(fd)
    if result:
        raise OSError(
            ctypes.get_errno(), f"cannot enter a network namespace: {os.strerror(ctypes.get_errno())}"
        )
    return os.open(_THIS_NETWORK, os.O_RDONLY)
