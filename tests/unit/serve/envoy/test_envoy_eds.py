"""The endpoints file for Envoy: Envoy's own messages can read it, it is stable, and it is whole at every
moment.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.base.types import Address, Endpoint, EndpointName, Role
from epp.serve.envoy.eds import render, write


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
    text = render(endpoints)
    expected = {(e.address.host, e.address.port) for e in endpoints}
    found = addresses_in(text)
    assert set(found) == expected
    assert len(found) == len(expected)
    assert render([*reversed(endpoints), *endpoints[:3]]) == text


@pytest.mark.slow
@given(st.lists(ENDPOINTS, min_size=1, max_size=6))
def test_the_version_follows_the_content_and_no_other_file_is_left(history: list[list[Endpoint]]) -> None:
    with TemporaryDirectory() as directory:
        path = Path(directory) / "eds.json"
        versions: dict[str, frozenset[Address]] = {}
        before: frozenset[Address] | None = None
        for endpoints in history:
            held = frozenset(e.address for e in endpoints)
            assert write(path, endpoints) == (held != before)
            before = held
            assert [each.name for each in Path(directory).iterdir()] == ["eds.json"], "no other file is left"
            version = json.loads(path.read_bytes())["version_info"]
            assert versions.setdefault(version, held) == held


def test_a_file_is_written_without_endpoints_and_without_its_directory(tmp_path: Path) -> None:
    path = tmp_path / "run" / "eds.json"
    assert write(path, [])
    assert addresses_in(path.read_bytes()) == []
    assert path.stat().st_mode & 0o777 == 0o644


def test_a_file_that_somebody_else_changed_is_written_again(tmp_path: Path) -> None:
    path = tmp_path / "eds.json"
    path.write_text("not json")
    assert write(path, [endpoint_at("10.0.0.1:8000")])
    assert path.read_bytes() == render([endpoint_at("10.0.0.1:8000")])


def test_endpoints_that_only_compute_prompts_are_not_in_the_file() -> None:
    """When the picker is away, Envoy goes round robin over the endpoints of the file."""
    helper = Endpoint(EndpointName("p"), Address("10.0.0.2", 8000), role=Role.PREFILL)
    assert addresses_in(render([endpoint_at("10.0.0.1:8000"), helper])) == [("10.0.0.1", 8000)]
