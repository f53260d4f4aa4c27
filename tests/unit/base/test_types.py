"""Addresses as text: what Envoy, Kubernetes and people write, and nothing else."""

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.base.types import Address


@pytest.mark.parametrize(
    ("text", "host", "port", "written"),
    [
        ("10.0.0.1:8000", "10.0.0.1", 8000, "10.0.0.1:8000"),
        (" 10.0.0.1:8000 ", "10.0.0.1", 8000, "10.0.0.1:8000"),
        ("[fd00::1]:8000", "fd00::1", 8000, "[fd00::1]:8000"),
        ("[FD00:0:0::0001]:1", "fd00::1", 1, "[fd00::1]:1"),
        ("0.0.0.0:65535", "0.0.0.0", 65535, "0.0.0.0:65535"),
    ],
)
def test_an_address_is_read_in_its_usual_form(text: str, host: str, port: int, written: str) -> None:
    address = Address.parse(text)
    assert (address.host, address.port) == (host, port)
    assert str(address) == written


@pytest.mark.parametrize(
    "text",
    [
        "",
        ":",
        "10.0.0.1",
        "10.0.0.1:",
        ":8000",
        "10.0.0.1:0",
        "10.0.0.1:65536",
        "10.0.0.1:-1",
        "10.0.0.1:+80",
        "10.0.0.1:8_0",
        "10.0.0.1:\u0661",
        "10.0.0:80",
        "10.0.0.1.1:80",
        "[10.0.0.1]:80",
        "fd00::1:8000",
        "[fd00::1]",
        "[fd00::1]8000",
        "[]:80",
        "localhost:80",
        "10.0.0.1:80,10.0.0.2:80",
        "10.0.0.1:" + "9" * 5000,
    ],
)
def test_other_text_is_refused_with_an_error_that_names_the_form(text: str) -> None:
    with pytest.raises(ValueError, match="is not ip:port"):
        Address.parse(text)


@given(ip=st.ip_addresses(), port=st.integers(1, 65535))
def test_a_written_address_is_read_back(ip: ipaddress.IPv4Address | ipaddress.IPv6Address, port: int) -> None:
    address = Address(host=str(ip), port=port)
    assert Address.parse(str(address)) == address


@given(st.text())
def test_no_text_makes_it_fail_with_anything_but_a_value_error(text: str) -> None:
    try:
        address = Address.parse(text)
    except ValueError:
        return
    assert Address.parse(str(address)) == address
