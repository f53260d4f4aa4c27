"""Reads the wanted adapters from a YAML file. In a cluster this file is a mounted ConfigMap. Caller:
`loop`.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import yaml

from model_server.pods.sync.errors import AdapterFileError
from model_server.pods.sync.plan import AdapterName, Adapters


class _Adapter(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    name: str
    path: str


class _File(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    adapters: tuple[_Adapter, ...]


def read_adapters(file: Path) -> Adapters:
    """Return the wanted adapters. Raise AdapterFileError if the file is not complete and valid. A file
    without the key `adapters` is not valid either. A file that lists no adapters has an empty list.
    """
    try:
        found = msgspec.convert(yaml.safe_load(file.read_bytes()), _File).adapters
    except OSError as error:
        raise AdapterFileError(f"{file} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise AdapterFileError(f"{file} is not YAML: {' '.join(str(error).split())}") from error
    except msgspec.ValidationError as error:
        raise AdapterFileError(f"{file}: {error}") from error
    wanted: dict[AdapterName, str] = {}
    for adapter in found:
        if not adapter.name or not adapter.path:
            raise AdapterFileError(f"{file}: an adapter needs a name and a path")
        if adapter.name in wanted:
            raise AdapterFileError(f"{file}: {adapter.name!r} is listed twice")
        wanted[AdapterName(adapter.name)] = adapter.path
    return wanted
