"""The files from which Envoy learns where its certificates are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from epp.config.listening import Listen
from epp.config.tls import Tls
from epp.serve.envoy import sds
from tests.unit.serve.envoy.configs import a_config

PAIR = Tls(cert_file="/tls/tls.crt", key_file="/tls/tls.key")
MUTUAL = Tls(cert_file="/tls/tls.crt", key_file="/tls/tls.key", client_ca_file="/ca/ca.crt")


def written(folder: Path, *, clients: Tls | None = None, picker: Tls | None = None) -> dict[str, Any]:
    """Write the files. Return the secret in each, by its name."""
    config = a_config(eds_file=str(folder / "eds.json"), tls=clients, listen=Listen(tls=picker))
    sds.write(config)
    found = {}
    for file in folder.iterdir():
        (secret,) = json.loads(file.read_bytes())["resources"]
        assert file.name == f"eds.{secret['name']}.json"
        assert str(file) == sds.path(config, secret["name"])
        found[secret["name"]] = secret
    return found


@pytest.mark.parametrize(
    ("clients", "picker", "names"),
    [
        (None, None, set()),
        (PAIR, None, {sds.GATEWAY_IDENTITY}),
        (MUTUAL, None, {sds.GATEWAY_IDENTITY, sds.CLIENT_TRUST}),
        (None, PAIR, {sds.PICKER_TRUST}),
        (MUTUAL, MUTUAL, {sds.GATEWAY_IDENTITY, sds.CLIENT_TRUST, sds.PICKER_TRUST, sds.PICKER_CLIENT}),
    ],
    ids=["none", "clients", "clients-mutual", "picker", "all"],
)
def test_there_is_a_file_for_each_certificate_that_envoy_needs(
    tmp_path: Path, clients: Tls | None, picker: Tls | None, names: set[str]
) -> None:
    assert set(written(tmp_path, clients=clients, picker=picker)) == names


def test_without_a_ca_envoy_trusts_the_pickers_own_certificate(tmp_path: Path) -> None:
    own = written(tmp_path, picker=PAIR)[sds.PICKER_TRUST]["validation_context"]
    assert own["trusted_ca"] == {"filename": "/tls/tls.crt"}
    ca = Tls(cert_file="/tls/tls.crt", key_file="/tls/tls.key", ca_file="/ca/picker.crt")
    named = written(tmp_path, picker=ca)[sds.PICKER_TRUST]["validation_context"]
    assert named == {"trusted_ca": {"filename": "/ca/picker.crt"}, "watched_directory": {"path": "/ca"}}


def test_a_file_names_the_key_and_does_not_hold_it(tmp_path: Path) -> None:
    (tmp_path / "certs").mkdir()
    pair = Tls(cert_file=str(tmp_path / "certs/tls.crt"), key_file=str(tmp_path / "certs/tls.key"))
    Path(pair.key_file).write_text("SECRET")
    (tmp_path / "envoy").mkdir()
    identity = written(tmp_path / "envoy", clients=pair)[sds.GATEWAY_IDENTITY]["tls_certificate"]
    assert identity["private_key"] == {"filename": pair.key_file}
    assert identity["watched_directory"] == {"path": str(tmp_path / "certs")}
    assert all(b"SECRET" not in file.read_bytes() for file in (tmp_path / "envoy").iterdir())


def test_symbolic_links_in_a_path_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    monkeypatch.chdir(tmp_path)
    assert sds.absolute("link/tls.crt") == f"{tmp_path}/link/tls.crt"
    assert sds.directory_of(sds.absolute("link/tls.crt")) == {"path": f"{tmp_path}/link"}
