"""A container's environment and command line, from its spec and what the spec refers to."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

from tests.harness.kubelet.api import JsonObject

_REFERENCE: Final = re.compile(r"\$\$|\$\(([A-Za-z_.-][\w.-]*)\)")
_KEYED: Final = re.compile(r"metadata\.(labels|annotations)\['([^']+)'\]")
_UNITS: Final = {
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "Ti": 2**40,
    "k": 10**3,
    "M": 10**6,
    "G": 10**9,
    "m": 10**-3,
}
_NODE_ALLOCATABLE: Final = {"cpu": "64", "memory": "512Gi", "ephemeral-storage": "100Gi"}


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
    for source in container.get("envFrom", []):
        variables.update(await _all_of(source, sources))
    for entry in container.get("env", []):
        if "valueFrom" in entry:
            value = await _value_from(entry["valueFrom"], container=container, pod=pod, sources=sources)
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
    metadata, spec, status = pod["metadata"], pod["spec"], pod["status"]
    if keyed := _KEYED.fullmatch(path):
        return str((metadata.get(keyed[1]) or {}).get(keyed[2], ""))
    if path in {"metadata.labels", "metadata.annotations"}:
        pairs = (metadata.get(path.partition(".")[2]) or {}).items()
        return "\n".join(f'{key}="{value}"' for key, value in sorted(pairs))
    known: dict[str, Callable[[], Any]] = {
        "metadata.name": lambda: metadata["name"],
        "metadata.namespace": lambda: metadata["namespace"],
        "metadata.uid": lambda: metadata["uid"],
        "spec.nodeName": lambda: spec["nodeName"],
        "spec.serviceAccountName": lambda: spec.get("serviceAccountName", "default"),
        "status.hostIP": lambda: status["hostIP"],
        "status.podIP": lambda: status["podIP"],
        "status.podIPs": lambda: ",".join(entry["ip"] for entry in status["podIPs"]),
    }
    if path not in known:
        raise ConfigError(f"fieldRef {path} is not known")
    return str(known[path]())


def resource(reference: JsonObject, container: JsonObject) -> str:
    """Return the value of the downward API's resourceFieldRef, rounded up as in the kubelet."""
    kind, _, name = reference["resource"].partition(".")
    resources = container.get("resources", {})
    chosen = resources.get(kind, {}).get(name)
    if chosen is None:
        chosen = _NODE_ALLOCATABLE[name] if kind == "limits" else "0"
    value, divisor = quantity(chosen), quantity(reference.get("divisor") or "1")
    return str(-int(-value // (divisor or 1)))


def quantity(text: str) -> float:
    """Return a Kubernetes quantity as a number."""
    for suffix, factor in _UNITS.items():
        if str(text).endswith(suffix):
            return float(str(text).removesuffix(suffix)) * factor
    return float(text)


def decoded(document: JsonObject) -> dict[str, bytes]:
    """Return the values of a Secret."""
    return {key: base64.b64decode(value) for key, value in (document.get("data") or {}).items()}


def plain(document: JsonObject) -> dict[str, bytes]:
    """Return the values of a ConfigMap."""
    texts = {key: value.encode() for key, value in (document.get("data") or {}).items()}
    return texts | {key: base64.b64decode(value) for key, value in (document.get("binaryData") or {}).items()}


async def _all_of(source: JsonObject, sources: Sources) -> dict[str, str]:
    reference = source.get("configMapRef") or source["secretRef"]
    read = sources.config_map if "configMapRef" in source else sources.secret
    values = await read(reference["name"])
    if values is None:
        if reference.get("optional"):
            return {}
        raise ConfigError(f"{reference['name']} of envFrom not found")
    prefix = source.get("prefix", "")
    return {prefix + key: value.decode() for key, value in values.items()}


async def _value_from(
    source: JsonObject, *, container: JsonObject, pod: JsonObject, sources: Sources
) -> str | None:
    if "fieldRef" in source:
        return field(source["fieldRef"]["fieldPath"], pod)
    if "resourceFieldRef" in source:
        return resource(source["resourceFieldRef"], container)
    reference = source.get("configMapKeyRef") or source.get("secretKeyRef")
    if reference is None:
        raise ConfigError(f"valueFrom {sorted(source)} is not known")
    read = sources.config_map if "configMapKeyRef" in source else sources.secret
    values = await read(reference["name"])
    if values is None or reference["key"] not in values:
        if reference.get("optional"):
            return None
        raise ConfigError(f"key {reference['key']} of {reference['name']} not found")
    return values[reference["key"]].decode()
