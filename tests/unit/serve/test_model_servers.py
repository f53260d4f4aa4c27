"""The servers of `epp up`: the forms that it takes, and the endpoints that it makes of their addresses."""

import pytest

from epp.base.errors import ConfigError
from epp.serve.up import ServerName, addresses_of, endpoints_yaml, parsed
from epp.sources.files.endpoints_file import load_endpoints


@pytest.mark.parametrize(
    ("text", "server"),
    [
        ("10.0.0.2:8001", ServerName("10.0.0.2", 8001)),
        ("vllm-a", ServerName("vllm-a", 8000)),
        ("HTTP://vllm-A", ServerName("vllm-a", 80)),
        ("http://vllm-a:8000/v1/", ServerName("vllm-a", 8000)),
        ("[fd00::1]:8000", ServerName("fd00::1", 8000)),
    ],
)
def test_a_server_is_an_address_a_name_or_a_url(text: str, server: ServerName) -> None:
    assert parsed(text) == server


@pytest.mark.parametrize(
    "text", ["https://a:443", "a:b", "a:99999", "a:0", ":8000", "http://u:p@a", "a/b", "http://[a", "ftp://a"]
)
def test_any_other_text_is_refused_with_what_to_write(text: str) -> None:
    with pytest.raises(ConfigError, match="write HOST:PORT or http"):
        parsed(text)


async def test_a_name_with_addresses_of_both_families_is_one_server() -> None:
    assert await addresses_of(ServerName("localhost", 1)) == ["127.0.0.1"]
    assert await addresses_of(ServerName("::1", 1)) == ["::1"]


def test_each_address_is_an_endpoint_with_a_name_that_stays() -> None:
    found = [
        (ServerName("vllm", 8000), ["10.0.0.1", "10.0.0.2"]),
        (ServerName("10.0.0.1", 8000), ["10.0.0.1"]),  # the same server again
        (ServerName("fd00::1", 8000), ["fd00::1"]),
    ]
    listed = load_endpoints(endpoints_yaml(found), source="endpoints.yaml")
    assert {str(each.name): str(each.address) for each in listed.endpoints} == {
        "vllm/10.0.0.1:8000": "10.0.0.1:8000",
        "vllm/10.0.0.2:8000": "10.0.0.2:8000",
        "fd00::1:8000": "[fd00::1]:8000",
    }
