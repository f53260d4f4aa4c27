"""A container's environment and command line, from its spec and what the spec refers to."""

import base64
import re
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

from tests.harness.kubelet.api import JsonObject

_REFERENCE: Final = re.compile(r"\$\$|\$\(([A-Za-z_.-][\w.-]*)\)")
_KEYED: Final = re.compile(r"metadata\.(labels|annotations)\['([^']+)'\]")
"""Envoy Gateway's proxy asks for its zone so."""


class ConfigError(Exception):
    """The pod refers to something that does not exist. The container waits with CreateContainerConfigError
    and this message.
    """


class Sources(Protocol):
    """Reads ConfigMaps and Secrets: decoded values by key, or None if the object does not exist."""

    async def config_map(self, name: str) -> Mapping[str, bytes] | None: ...

    async def secret(self, name: str) -> Mapping[str, bytes] | None: ...


async def resolve(
    container: JsonObject, *, pod: JsonObject, sources: Sources, given: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables, in the order in which Kubernetes lets one refer to another. `given` are the
    image's variables.
    """
    variables = dict(given)
    for entry in container.get("env", []):
        if "valueFrom" in entry:
            value = await _value_from(entry["valueFrom"], pod=pod, sources=sources)
            if value is None:
                continue
        else:
            value = expand(entry.get("value", ""), variables)
        variables[entry["name"]] = value
    return variables


def expand(text: str, variables: Mapping[str, str]) -> str:
    """Replace $(NAME). An unknown name stays as it is, and $$ becomes a dollar."""

    def replaced(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        return variables.get(match[1], match[0])

    return _REFERENCE.sub(replaced, text)


def field(path: str, pod: JsonObject) -> str:
    """Return the value of the downward API's fieldRef."""
    metadata, status = pod["metadata"], pod["status"]
    if keyed := _KEYED.fullmatch(path):
        return str((metadata.get(keyed[1]) or {}).get(keyed[2], ""))
    known: dict[str, Callable[[], Any]] = {
        "metadata.name": lambda: metadata["name"],
        "metadata.namespace": lambda: metadata["namespace"],
        "status.podIP": lambda: status["podIP"],
    }
    if path not in known:
        raise ConfigError(f"fieldRef {path} is not known")
    return str(known[path]())


def decoded(document: JsonObject) -> dict[str, bytes]:
    """Return the values of a Secret."""
    return {key: base64.b64decode(value) for key, value in (document.get("data") or {}).items()}


def plain(document: JsonObject) -> dict[str, bytes]:
    """Return the values of a ConfigMap."""
    texts = {key: value.encode() for key, value in (document.get("data") or {}).items()}
    return texts | {key: base64.b64decode(value) for key, value in (document.get("binaryData") or {}).items()}


async def _value_from(source: JsonObject, *, pod: JsonObject, sources: Sources) -> str | None:
    if "fieldRef" in source:
        return field(source["fieldRef"]["fieldPath"], pod)
    if "secretKeyRef" not in source:
        raise ConfigError(f"valueFrom {sorted(source)} is not known")
    reference = source["secretKeyRef"]
    values = await sources.secret(reference["name"])
    if values is None or reference["key"] not in values:
        if reference.get("optional"):
            return None
        raise ConfigError(f"key {reference['key']} of {reference['name']} not found")
    return values[reference["key"]].decode()
