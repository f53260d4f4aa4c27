"""Becomes the first process of a container: `python -I -S launch.py SPEC.json`, run as a file with nothing
but the standard library.

It makes mount, PID, IPC and host-name namespaces inside the pod's network namespace. It builds a root of
read-only views of this machine's folders, or of a built image, with the pod's volumes on top. Then it takes
the container's user and capabilities, and executes its command as process 1. The process that stays behind
plays the runtime's shim: it waits, and ends as the container ended. The reader of `started_fd` gets the
number of the first process, and the end of the file once the command runs (or cannot run).
"""

import ctypes
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any, Final

_NEW_MOUNT: Final = 0x00020000
_NEW_HOST_NAME: Final = 0x04000000
_NEW_IPC: Final = 0x08000000
_NEW_PID: Final = 0x20000000
_NEW_NETWORK: Final = 0x40000000
_READ_ONLY: Final = 1
_NO_SETUID: Final = 2
_REMOUNT: Final = 32
_BIND: Final = 4096
_RECURSIVE: Final = 16384
_PRIVATE: Final = 1 << 18
_DETACH: Final = 2
_SYS_PIVOT_ROOT: Final = 155
_PR_CAPBSET_DROP: Final = 24
_PR_SET_NO_NEW_PRIVS: Final = 38
_LAST_CAPABILITY: Final = 40
_DEVICES: Final = ("null", "zero", "full", "random", "urandom")
_SYSTEM: Final = ("usr", "bin", "sbin", "lib", "lib64")
_SYSTEM_FILES: Final = ("etc/ld.so.cache", "etc/ssl", "etc/localtime")

_library = ctypes.CDLL(None, use_errno=True)


def main(path: str) -> int:
    spec: dict[str, Any] = json.loads(Path(path).read_text())
    _call(_library.setns, spec["network_fd"], _NEW_NETWORK)
    _call(_library.unshare, _NEW_MOUNT | _NEW_PID | _NEW_IPC | _NEW_HOST_NAME)
    started = spec["started_fd"]
    for fd in (started, spec["network_fd"]):
        os.set_inheritable(fd, False)  # the command must not inherit these, and its start closes `started`
    child = os.fork()
    if child == 0:
        try:
            _become(spec)
        except OSError as error:
            print(f"cannot start the container: {error}", file=sys.stderr, flush=True)
        os._exit(127)
    os.write(started, str(child).encode())
    os.close(started)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    return 128 - code if code < 0 else code


def _become(spec: dict[str, Any]) -> None:
    root = Path(spec["root"])
    _build_root(root, spec)
    os.chdir(root)
    _call(_library.syscall, _SYS_PIVOT_ROOT, b".", b".")
    _call(_library.umount2, b".", _DETACH)
    os.chdir("/")
    host_name = spec["host_name"].encode()
    _call(_library.sethostname, host_name, len(host_name))
    os.setsid()
    os.umask(0o022)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(
            number, signal.SIG_DFL
        )  # Python ignores these signals, and exec keeps ignored signals ignored
    _take_user(spec)
    os.chdir(spec["directory"])
    os.execvpe(spec["command"][0], spec["command"], spec["variables"])


def _build_root(root: Path, spec: dict[str, Any]) -> None:
    _mount("none", Path("/"), "", _RECURSIVE | _PRIVATE)
    _mount("container", root, "tmpfs", 0, "mode=755,size=1g")
    if spec["image_root"]:
        _show_image(root, spec["image_root"])
    else:
        _show_machine(root)
    for name in _DEVICES:
        _bind(Path("/dev", name), root / "dev" / name, read_only=False)
    (root / "dev" / "shm").mkdir(mode=0o1777, exist_ok=True)
    _mount("shm", root / "dev" / "shm", "tmpfs", 0, "mode=1777,size=64m")
    _mount("proc", root / "proc", "proc", 0)
    for bind in spec["binds"]:
        _bind(Path(bind["source"]), _inside(root, bind["target"]), read_only=bind["read_only"])
    if spec["read_only_root"]:
        _mount("container", root, "", _REMOUNT | _READ_ONLY | _BIND)


def _show_image(root: Path, image: str) -> None:
    """Show the folder of a built image, with a layer on it that takes all writes and ends
    with the container.
    """
    for name in ("upper", "work"):
        (root / name).mkdir()
    layers = f"lowerdir={image},upperdir={root}/upper,workdir={root}/work"
    _mount("image", root, "overlay", 0, layers)
    for name in ("proc", "dev", "tmp", "run"):
        (root / name).mkdir(exist_ok=True)


def _show_machine(root: Path) -> None:
    for name in _SYSTEM:
        host = Path("/", name)
        if host.is_symlink():
            (root / name).symlink_to(host.readlink())
        elif host.exists():
            _bind(host, root / name, read_only=True)
    for name in ("tmp", "run", "var", "dev", "proc", "etc"):
        (root / name).mkdir()
    (root / "tmp").chmod(0o1777)
    for name in _SYSTEM_FILES:
        if Path("/", name).exists():
            _bind(Path("/", name).resolve(), root / name, read_only=True)
    (root / "etc" / "passwd").write_text("root:x:0:0::/:\nnonroot:x:65532:65532::/tmp:\n")
    (root / "etc" / "group").write_text("root:x:0:\nnonroot:x:65532:\n")
    (root / "etc" / "nsswitch.conf").write_text("hosts: files\n")
    (root / "etc" / "resolv.conf").touch()


def _take_user(spec: dict[str, Any]) -> None:
    keep = set(spec["capabilities"])
    for capability in range(_LAST_CAPABILITY + 1):
        if capability not in keep:
            _library.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)  # an unknown number is no error here
    if spec["no_new_privileges"]:
        _call(_library.prctl, _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    os.setgroups(spec["groups"])
    os.setgid(spec["gid"])
    os.setuid(spec["uid"])


def _inside(root: Path, target: str) -> Path:
    """Return the place of `target` in the container. A link there, such as /var/run, means a place below
    `root`.
    """
    place = root
    for name in Path(target).parts[1:]:
        place /= name
        if place.is_symlink():
            link = place.readlink()
            place = _inside(root, str(link)) if link.is_absolute() else place.parent / link
    return place


def _bind(source: Path, target: Path, *, read_only: bool) -> None:
    if source.is_dir():
        target.mkdir(parents=True, exist_ok=True)
    elif not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()
    _mount(str(source), target, "", _BIND | _RECURSIVE)
    if read_only:
        _mount(str(source), target, "", _BIND | _REMOUNT | _READ_ONLY | _NO_SETUID)


def _mount(source: str, target: Path, kind: str, flags: int, options: str = "") -> None:
    try:
        _call(
            _library.mount,
            source.encode(),
            bytes(target),
            kind.encode() or None,
            flags,
            options.encode() or None,
        )
    except OSError as error:
        raise OSError(error.errno, f"mount {source} at {target}: {os.strerror(error.errno or 0)}") from error


def _call(function: Any, *arguments: object) -> None:
    if function(*arguments) < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
