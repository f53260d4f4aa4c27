"""Libraries that satisfy the dynamic loader where PyPI's torch asks for CUDA,
on a machine that will never call them.

The torch wheel links to libcudart, libcublas, libnccl and so on, 4 GB of packages that a CPU run does not
use, and `import torch` fails without them. This module reads from torch's own libraries which names they
miss, and compiles for each missing library one of the same name in which every function reports "no CUDA
device". The result is for tests only. Called by `environment`; needs a C compiler and readelf.
"""

from __future__ import annotations

import re
import subprocess
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

NO_DEVICE = 100
"""cudaErrorNoDevice. Every other CUDA library takes any value but 0 for a failure too."""

_CUDA_LIBRARY = re.compile(r"lib(cu|nv|nccl)\w*\.so\.\d+")
_CUDA_FUNCTION = re.compile(r"(__)?(cu|nccl|nv)")
_DRIVER = (
    "libcuda.so.1"  # comes with the GPU's driver; torch loads it by itself, and only where it finds a GPU
)
_NEEDED = re.compile(r"\(NEEDED\).*\[(?P<library>[^]]+)\]")
_VERSION_FILE = re.compile(r"\bFile: (?P<library>\S+)")
_VERSION_NAME = re.compile(r"\bName: (?P<version>\S+) ")


@dataclass(frozen=True, slots=True)
class Symbol:
    name: str
    version: str
    """Empty if the reference asks for no particular version."""


@dataclass(frozen=True, slots=True)
class SharedObject:
    """What one ELF file asks of the loader: names, versions and libraries."""

    needed: frozenset[str]
    undefined: frozenset[Symbol]
    version_owner: Mapping[str, str]
    """Symbol version -> the library that must define it."""


def read_shared_object(path: Path) -> SharedObject:
    """Parse readelf's account of `path`."""
    text = _readelf("--dynamic", "--version-info", path)
    owners: dict[str, str] = {}
    library = ""
    for line in text.splitlines():
        if found := _VERSION_FILE.search(line):
            library = found["library"]
        elif library and (found := _VERSION_NAME.search(line)):
            owners[found["version"]] = library
    undefined = set()
    for line in _readelf("--dyn-syms", path).splitlines():
        fields = line.split()
        if len(fields) >= 8 and fields[6] == "UND" and fields[4] == "GLOBAL":
            name, _, version = fields[7].partition("@")
            undefined.add(Symbol(name=name, version=version.lstrip("@")))
    return SharedObject(
        needed=frozenset(_NEEDED.findall(text)), undefined=frozenset(undefined), version_owner=owners
    )


def plan(objects: Mapping[str, SharedObject]) -> dict[str, set[Symbol]]:
    """Return which stand-ins `objects` (file name -> what it asks for) need, and what each must define.
    A versioned symbol belongs to the library that its version names. The loader finds a symbol without a
    version in any library that the asking object loads, so such a symbol goes into the first.
    """
    standins: dict[str, set[Symbol]] = {}
    for shared in objects.values():
        missing = sorted(
            n for n in shared.needed - objects.keys() if _CUDA_LIBRARY.fullmatch(n) and n != _DRIVER
        )
        if not missing:
            continue
        for library in missing:
            standins.setdefault(library, set())
        for symbol in shared.undefined:
            owner = shared.version_owner.get(symbol.version, "")
            if owner in standins:
                standins[owner].add(symbol)
            elif not symbol.version and _CUDA_FUNCTION.match(symbol.name):
                standins[missing[0]].add(symbol)
    return standins


def source(symbols: set[Symbol]) -> str:
    """Return a C file that defines `symbols`."""
    return "\n".join(["static char handle[4096];", *sorted({_definition(s.name) for s in symbols}), ""])


def version_script(symbols: set[Symbol]) -> str:
    """Return a linker script that gives each of `symbols` its version."""
    names: defaultdict[str, list[str]] = defaultdict(list)
    for symbol in symbols:
        if symbol.version:
            names[symbol.version].append(symbol.name)
    return "".join(
        f"{version} {{ global: {'; '.join(sorted(n))}; }};\n" for version, n in sorted(names.items())
    )


def build(site_packages: Path, *, compiler: str = "gcc") -> list[str]:
    """Compile every stand-in that the torch of `site_packages` needs; return their names."""
    torch_libraries = sorted((site_packages / "torch" / "lib").glob("*.so*"))
    # This is one of the folders that the wheel's libraries already search.
    folder = site_packages / "nvidia" / "cu13" / "lib"
    folder.mkdir(parents=True, exist_ok=True)
    standins = plan({path.name: read_shared_object(path) for path in torch_libraries})
    for library, symbols in standins.items():
        c_file, script = folder / f"{library}.c", folder / f"{library}.map"
        c_file.write_text(source(symbols))
        script.write_text(version_script(symbols))
        command = [
            compiler,
            "-shared",
            "-fPIC",
            "-w",
            f"-Wl,-soname,{library}",
            "-o",
            str(folder / library),
            str(c_file),
        ]
        if script.stat().st_size:
            command.append(f"-Wl,--version-script={script}")
        subprocess.run(command, check=True)
        c_file.unlink()
        script.unlink()
    return sorted(standins)


def _definition(name: str) -> str:
    if name in {"cudaGetErrorString", "cudaGetErrorName"}:
        return f'const char *{name}(int error) {{ return "no CUDA on this machine"; }}'
    if name == "__cudaRegisterFatBinary":  # runs as torch loads, and torch hands its result back to CUDA
        return f"void *{name}(void) {{ return handle; }}"
    if name.startswith("__cuda") or name in {"cudaGetLastError", "cudaPeekAtLastError"}:
        return f"int {name}(void) {{ return 0; }}"
    return f"int {name}(void) {{ return {NO_DEVICE}; }}"


def _readelf(*arguments: str | Path) -> str:
    command = ["readelf", "--wide", *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
