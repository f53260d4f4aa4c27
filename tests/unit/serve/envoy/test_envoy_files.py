"""Files that Envoy follows: readable, whole at every moment, and written only if they change."""

import importlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.base.types import Address, Endpoint, EndpointName, Role
from epp.config.sections import Listen, Tls
from epp.serve.envoy import files
from epp.serve.envoy.files import render_endpoints, write_if_changed
from tests.harness.steps import steps
from tests.unit.serve.envoy.configs import a_config

PAIR = Tls(cert_file="/tls/tls.crt", key_file="/tls/tls.key")
MUTUAL = Tls(cert_file="/tls/tls.crt", key_file="/tls/tls.key", client_ca_file="/ca/ca.crt")


def endpoint_at(text: str, *, name: str = "") -> Endpoint:
    return Endpoint(name=EndpointName(name or text), address=Address.parse(text))


def addresses_in(text: bytes) -> list[tuple[str, int]]:
    endpoint, discovery = (  # seconds to import
        importlib.import_module(f"envoy_data_plane.envoy.{name}.v3")
        for name in ("config.endpoint", "service.discovery")
    )
    (packed,) = discovery.DiscoveryResponse.from_json(text).resources
    assignment = packed.unpack()
    assert isinstance(assignment, endpoint.ClusterLoadAssignment)
    assert assignment.cluster_name == "model-servers"
    found = []
    for locality in assignment.endpoints:
        for lb_endpoint in locality.lb_endpoints:
            assert lb_endpoint.endpoint
            assert lb_endpoint.endpoint.address
            socket_address = lb_endpoint.endpoint.address.socket_address
            assert socket_address
            assert socket_address.port_value
            found.append((socket_address.address, socket_address.port_value))
    return found


ENDPOINTS = st.lists(
    st.builds(
        lambda ip, port: Endpoint(
            name=EndpointName(f"{ip}:{port}"), address=Address(host=str(ip), port=port)
        ),
        st.ip_addresses(),
        st.integers(1, 65535),
    ),
    max_size=12,
)


@pytest.mark.slow
@given(ENDPOINTS, st.randoms(use_true_random=False))
def test_the_file_holds_each_address_once_and_does_not_depend_on_the_order(
    endpoints: list[Endpoint], rng: object
) -> None:
    text = render_endpoints(endpoints)
    expected = {(e.address.host, e.address.port) for e in endpoints}
    found = addresses_in(text)
    assert set(found) == expected
    assert len(found) == len(expected)
    assert render_endpoints([*reversed(endpoints), *endpoints[:3]]) == text


def test_the_version_follows_the_content(tmp_path: Path) -> None:
    path = tmp_path / "run" / "eds.json"
    versions = []
    for ports in ((), (1,), (1, 2), (1,)):
        write_if_changed(path, render_endpoints([endpoint_at(f"10.0.0.1:{port}") for port in ports]))
        versions.append(json.loads(path.read_bytes())["version_info"])
    assert len(set(versions)) == 3
    assert versions[1] == versions[3]
    path.write_text("not json")
    write_if_changed(path, render_endpoints([]))
    assert addresses_in(path.read_bytes()) == []


def test_endpoints_that_only_compute_prompts_are_not_in_the_file() -> None:
    """When the picker is away, Envoy goes round robin over the endpoints of the file."""
    helper = Endpoint(EndpointName("p"), Address("10.0.0.2", 8000), role=Role.PREFILL)
    assert addresses_in(render_endpoints([endpoint_at("10.0.0.1:8000"), helper])) == [("10.0.0.1", 8000)]


def test_the_file_costs_little_python_for_each_endpoint() -> None:
    endpoints = [endpoint_at(f"10.0.0.1:{port}") for port in range(1, 201)]
    assert steps(lambda: render_endpoints(endpoints)) < 20 * len(endpoints)


def test_an_equal_text_does_not_rewrite_the_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_if_changed(path, b"one")
    inode = path.stat().st_ino
    write_if_changed(path, b"one")
    assert path.stat().st_ino == inode


def test_a_reader_keeps_the_old_text_until_it_opens_the_file_again(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_if_changed(path, b"one")
    with path.open("rb") as reader:
        write_if_changed(path, b"two")
        assert reader.read() == b"one"
    assert path.read_bytes() == b"two"
    assert os.listdir(tmp_path) == ["file"], "nothing is left beside the file"  # noqa: PTH208 - hidden files too


def test_missing_folder_is_made_and_envoy_may_read_file_as_another_user(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "file"
    write_if_changed(path, b"one")
    assert path.stat().st_mode & 0o777 == 0o644


def test_a_rename_that_fails_leaves_no_temporary_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    write_if_changed(path, b"one")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match=f"No space left on device: '{path}'"):
        write_if_changed(path, b"two")
    assert path.read_bytes() == b"one"
    assert os.listdir(tmp_path) == ["file"]  # noqa: PTH208 - hidden files too


def written(folder: Path, *, clients: Tls | None = None, picker: Tls | None = None) -> dict[str, Any]:
    """Write the files. Return the secret in each, by its name."""
    config = a_config(eds_file=str(folder / "eds.json"), tls=clients, listen=Listen(tls=picker))
    files.write_first(config)
    found = {}
    for file in folder.glob("eds.*.json"):
        (secret,) = json.loads(file.read_bytes())["resources"]
        assert file.name == f"eds.{secret['name']}.json"
        assert str(file) == files.secret_path(config, secret["name"])
        found[secret["name"]] = secret
    return found


@pytest.mark.parametrize(
    ("clients", "picker", "names"),
    [
        (None, None, set()),
        (PAIR, None, {"gateway-identity"}),
        (MUTUAL, None, {"gateway-identity", "client-trust"}),
        (None, PAIR, {"picker-trust"}),
        (
            MUTUAL,
            MUTUAL,
            {"gateway-identity", "client-trust", "picker-trust", "picker-client"},
        ),
    ],
    ids=["none", "clients", "clients-mutual", "picker", "all"],
)
def test_there_is_a_file_for_each_certificate_that_envoy_needs(
    tmp_path: Path, clients: Tls | None, picker: Tls | None, names: set[str]
) -> None:
    assert set(written(tmp_path, clients=clients, picker=picker)) == names


def test_without_a_ca_envoy_trusts_the_pickers_own_certificate(tmp_path: Path) -> None:
    own = written(tmp_path, picker=PAIR)["picker-trust"]["validation_context"]
    assert own["trusted_ca"] == {"filename": "/tls/tls.crt"}
    ca = Tls(cert_file="/tls/tls.crt", key_file="/tls/tls.key", ca_file="/ca/picker.crt")
    named = written(tmp_path, picker=ca)["picker-trust"]["validation_context"]
    assert named == {"trusted_ca": {"filename": "/ca/picker.crt"}, "watched_directory": {"path": "/ca"}}


def test_a_file_names_the_key_and_does_not_hold_it(tmp_path: Path) -> None:
    (tmp_path / "certs").mkdir()
    pair = Tls(cert_file=str(tmp_path / "certs/tls.crt"), key_file=str(tmp_path / "certs/tls.key"))
    Path(pair.key_file).write_text("SECRET")
    (tmp_path / "envoy").mkdir()
    identity = written(tmp_path / "envoy", clients=pair)["gateway-identity"]["tls_certificate"]
    assert identity["private_key"] == {"filename": pair.key_file}
    assert identity["watched_directory"] == {"path": str(tmp_path / "certs")}
    assert all(b"SECRET" not in file.read_bytes() for file in (tmp_path / "envoy").iterdir())
