"""The volumes of one pod, as folders of this machine that its containers see.

ConfigMaps, Secrets, projected and downward-API volumes are written as a kubelet writes them. The files of one
state are in a folder of their own. `..data` is a symlink to this folder, which a rename moves to the next
state, and each file's name is a symlink through `..data`. So a reader sees one state or the next, never a
mixture. Called by `pod`, again and again.
"""

import itertools
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tests.harness.kubelet.api import Api, JsonObject
from tests.harness.kubelet.variables import ConfigError, Sources, field

_TOKEN_RENEWAL: Final = 0.8
"""A service-account token is fetched again after this part of its life, as in a kubelet."""
_DATA: Final = "..data"

_states = itertools.count()


class PodVolumes:
    """Makes the folders, and updates their content."""

    def __init__(self, folder: Path, *, pod: JsonObject, api: Api, sources: Sources) -> None:
        self._folder = folder
        self._pod = pod
        self._api = api
        self._sources = sources
        self._tokens: dict[str, tuple[bytes, float]] = {}

    def path(self, name: str) -> Path:
        return self._folder / name

    async def prepare(self) -> None:
        """Make or refresh every volume. Raise ConfigError if a volume cannot be made."""
        for volume in self._pod["spec"].get("volumes", []):
            path = self.path(volume["name"])
            if "emptyDir" in volume:
                self._make_empty(path)
            else:
                self._write(path, await self._content(volume))

    def changed(self, pod: JsonObject) -> None:
        """Note that the pod's labels or annotations may have changed."""
        self._pod = pod

    async def _content(self, volume: JsonObject) -> dict[str, tuple[bytes, int]]:
        """Return content and mode by relative path."""
        for kind in ("configMap", "secret", "downwardAPI", "projected"):
            if kind in volume:
                source = volume[kind]
                mode = source.get("defaultMode", 0o644)
                if kind == "projected":
                    parts = [
                        await self._source(*_only(part), mode=mode) for part in source.get("sources", [])
                    ]
                    return {path: file for part in parts for path, file in part.items()}
                return await self._source(kind, source, mode=mode)
        raise ConfigError(
            f"volume {volume['name']} is of a kind that this kubelet does not know: {sorted(volume)}"
        )

    async def _source(self, kind: str, source: JsonObject, *, mode: int) -> dict[str, tuple[bytes, int]]:
        if kind == "serviceAccountToken":
            return {source["path"]: (await self._token(source), mode)}
        if kind == "downwardAPI":
            return {
                item["path"]: (
                    field(item["fieldRef"]["fieldPath"], self._pod).encode(),
                    item.get("mode", mode),
                )
                for item in source["items"]
            }
        if kind == "configMap":
            name, values = source["name"], await self._sources.config_map(source["name"])
        elif kind == "secret":
            name = source.get("secretName") or source["name"]
            values = await self._sources.secret(name)
        else:
            raise ConfigError(f"projection of {kind} is not known")
        if values is None:
            if source.get("optional"):
                return {}
            raise ConfigError(f"{kind} {name} not found")
        return _chosen(values, source, mode=mode, name=name)

    async def _token(self, source: JsonObject) -> bytes:
        known, renew_at = self._tokens.get(source["path"], (b"", 0.0))
        if time.time() < renew_at:
            return known
        metadata, spec = self._pod["metadata"], self._pod["spec"]
        account = spec.get("serviceAccountName", "default")
        life_s = source.get("expirationSeconds", 3600)
        bound = {"apiVersion": "v1", "kind": "Pod", "name": metadata["name"], "uid": metadata["uid"]}
        request = {
            "audiences": [source["audience"]] if source.get("audience") else [],
            "expirationSeconds": life_s,
            "boundObjectRef": bound,
        }
        path = f"/api/v1/namespaces/{metadata['namespace']}/serviceaccounts/{account}/token"
        document = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": request}
        token = str((await self._api.create(path, document))["status"]["token"]).encode()
        self._tokens[source["path"]] = (token, time.time() + life_s * _TOKEN_RENEWAL)
        return token

    def _make_empty(self, path: Path) -> None:
        if not path.exists():
            path.mkdir(parents=True)
            self._own(path)
            path.chmod(0o2777 if self._group else 0o777)

    @property
    def _group(self) -> int | None:
        group: int | None = self._pod["spec"].get("securityContext", {}).get("fsGroup")
        return group

    def _own(self, path: Path) -> None:
        if self._group is not None:
            os.chown(path, -1, self._group)

    def _write(self, path: Path, files: Mapping[str, tuple[bytes, int]]) -> None:
        path.mkdir(parents=True, exist_ok=True)
        if _same(path / _DATA, files):
            return
        state = path / f"..{time.strftime('%Y_%m_%d_%H_%M_%S')}.{next(_states)}"
        for name, (content, mode) in files.items():
            file = state / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
            self._own(file)
            file.chmod(mode | 0o440 if self._group is not None else mode)
        state.mkdir(exist_ok=True)
        before = (path / _DATA).readlink() if (path / _DATA).is_symlink() else None
        following = path / "..data_tmp"
        following.symlink_to(state.name)
        following.rename(path / _DATA)
        names = {Path(name).parts[0] for name in files}
        for entry in path.iterdir():
            if not entry.name.startswith("..") and entry.name not in names:
                entry.unlink()
        for name in names:
            if not (path / name).is_symlink():
                (path / name).symlink_to(Path(_DATA) / name)
        if before is not None:
            shutil.rmtree(path / before)


def _only(source: JsonObject) -> tuple[str, JsonObject]:
    """Return kind and details of a projected source, which has exactly one kind."""
    ((kind, details),) = source.items()
    return kind, details


def _chosen(
    values: Mapping[str, bytes], source: JsonObject, *, mode: int, name: str
) -> dict[str, tuple[bytes, int]]:
    if "items" not in source:
        return {key: (value, mode) for key, value in values.items()}
    missing = [item["key"] for item in source["items"] if item["key"] not in values]
    if missing and not source.get("optional"):
        raise ConfigError(f"{name} has no key {', '.join(missing)}")
    return {
        item["path"]: (values[item["key"]], item.get("mode", mode))
        for item in source["items"]
        if item["key"] in values
    }


def _same(data: Path, files: Mapping[str, tuple[bytes, int]]) -> bool:
    if not data.is_symlink():
        return False
    present = {
        str(f.relative_to(data.resolve())): f.read_bytes() for f in data.resolve().rglob("*") if f.is_file()
    }
    return present == {name: content for name, (content, _) in files.items()}
