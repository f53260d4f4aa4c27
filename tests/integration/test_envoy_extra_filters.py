"""`envoy.extraHttpFilters`: a client without an API key gets 401 from the real Envoy. The keys are in a file
that changes while Envoy runs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from epp.base.errors import ConfigError
from epp.config.settings import load_config
from tests.harness.gateway import running_gateway
from tests.harness.processes import wait_until

pytestmark = pytest.mark.envoy

TYPE = "type.googleapis.com/envoy.extensions.filters.http.api_key_auth.v3.ApiKeyAuth"


def filter_of(path: Path) -> dict[str, Any]:
    """Return the filter that docs/security.md shows, with the file of this test."""
    watched = {"path": str(path), "watched_directory": {"path": str(path.parent)}}
    source = {"resource_api_version": "V3", "path_config_source": watched}
    return {"name": "api-keys", "config_discovery": {"config_source": source, "type_urls": [TYPE]}}


def write_keys(path: Path, *keys: str) -> None:
    """Write the keys as Kubernetes updates a mounted Secret: a link to the folder with the new state replaces
    the old link.
    """
    auth = {
        "@type": TYPE,
        "credentials": [{"key": key, "client": f"client-{n}"} for n, key in enumerate(keys)],
        "key_sources": [{"header": "authorization"}],
        "forwarding": {"hide_credentials": True},
    }
    extension = {"@type": "type.googleapis.com/envoy.config.core.v3.TypedExtensionConfig", "name": "api-keys"}
    state = path.parent / f"..{keys[0]}"
    state.mkdir(parents=True)
    (state / path.name).write_text(json.dumps({"resources": [{**extension, "typed_config": auth}]}))
    following = path.parent / "..data_tmp"
    following.symlink_to(state.name)
    following.rename(path.parent / "..data")
    if not path.is_symlink():
        path.symlink_to(Path("..data") / path.name)


async def test_only_clients_with_a_key_get_in_and_keys_change_without_a_restart(tmp_path: Path) -> None:
    keys = tmp_path / "api-keys" / "keys.yaml"
    write_keys(keys, "first")
    async with running_gateway(
        tmp_path, backends=1, envoy={"extraHttpFilters": [filter_of(keys)]}
    ) as gateway:

        async def status(key: str) -> int:
            return (await gateway.client.complete("hello", headers={"authorization": f"Bearer {key}"})).status

        async def is_so() -> bool:
            return (await status("first"), await status("second")) == (200, 401)

        await wait_until(is_so, what="Envoy knows the first key")
        refused = await gateway.client.complete("hello")
        assert (refused.status, refused.json()["error"]["code"]) == (401, "not_authenticated")
        assert "authorization" not in gateway.backends[0].prompts[-1].headers, "the key stays at the gateway"
        write_keys(keys, "second")

        async def is_turned() -> bool:
            return (await status("first"), await status("second")) == (401, 200)

        await wait_until(is_turned, what="Envoy knows the second key and no longer the first")


def test_a_filter_without_a_name_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("{endpointsFile: e.yaml, envoy: {extraHttpFilters: [{typed_config: {}}]}}")
    with pytest.raises(ConfigError, match=r"envoy\.extraHttpFilters\[0\]: has no name"):
        load_config(path)
