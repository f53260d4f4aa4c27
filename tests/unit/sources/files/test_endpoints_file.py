"""What an endpoints file may contain, and the message for a wrong one."""

import pytest

from epp.base.errors import ConfigError
from epp.base.types import Address, Role
from epp.sources.files.endpoints_file import load_endpoints


def test_every_field_is_read() -> None:
    (endpoint,) = load_endpoints(
        """
endpoints:
  - name: pod-a:8000
    address: 10.0.0.1:8000
    model: llama-8b
    adapters: [sql, legal, sql]
    labels: {zone: eu-1}
""",
        source="e.yaml",
    ).endpoints
    assert endpoint.name == "pod-a:8000"
    assert endpoint.address == Address("10.0.0.1", 8000)
    assert endpoint.model == "llama-8b"
    assert endpoint.adapters == {"sql", "legal"}


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("address: 10.0.0.1:8000", "10.0.0.1:8000"),
        ("address: 10.0.0.1\n    port: 8000", "10.0.0.1:8000"),
        ('address: "[fd00::1]:8000"', "[fd00::1]:8000"),
        ('address: "fd00::1"\n    port: 8000', "[fd00::1]:8000"),
        ('address: "[fd00::1]"\n    port: 8000', "[fd00::1]:8000"),
    ],
)
def test_the_port_may_be_part_of_the_address_or_its_own_field(written: str, read: str) -> None:
    (endpoint,) = load_endpoints(f"endpoints:\n  - name: a\n    {written}\n", source="e.yaml").endpoints
    assert str(endpoint.address) == read


def test_an_explicit_empty_list_means_no_endpoints() -> None:
    assert list(load_endpoints("endpoints: []", source="e.yaml").endpoints) == []


A = "{name: a, address: '10.0.0.1:80'}"
UNFIT = ["!!bool x", "!!int ''", "!!timestamp x", "!!float x", *("[" * n + "]" * n for n in (900, 10**5))]
"""Values that do not fit their tags, and values that are nested too deep."""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        # a file without a list is not taken for an empty list
        ("", r"e\.yaml: is empty; a file that lists no servers says `endpoints: \[\]`"),
        ("# nothing yet\n", r"is empty"),
        ("{}", r"there is no `endpoints`"),
        ("endpoints:\n", r"endpoints"),
        ("endpoints: [{name: '', address: '10.0.0.1:80'}]", r"endpoints\[0\]\.name"),
        ("endpoints: [{name: 'a b', address: '10.0.0.1:80'}]", r"endpoints\[0\]\.name"),
        ("endpoints: [{name: a, address: '10.0.0.1:80', weight: 3}]", r"unknown field `weight`"),
        ("endpoints: [{name: a, address: '10.0.0.1', port: 0}]", r"endpoints\[0\]\.port"),
        (
            f"endpoints: [{A}, {{name: b, address: 10.0.0.1}}]",
            r"endpoints\[1\]\.address: .*:8000, is missing",
        ),
        ("endpoints: [{name: a, address: 'gpu-1:80'}]", r"endpoints\[0\]\.address: .*not ip:port"),
        (
            "endpoints: [{name: a, address: '10.0.0.1:80', port: 80}]",
            r"endpoints\[0\]\.address: '10.0.0.1:80:80' ",
        ),
        (
            f"endpoints: [{A}, {{name: b, address: 10.0.0.1, port: 80}}]",
            r"endpoints\[1\]\.address: .* already",
        ),
        ("endpoints: [{name: a, address: '10.0.0.1:80', metrics: '8002'}]", r"metrics"),
        ("endpoints: [{name: a, address: '10.0.0.1:80', metrics: 'http://10.0.0.9/'}]", r"metrics"),
        ("endpoints: [{name: a, address: '10.0.0.1:80', role: judge}]", r"endpoints\[0\].role"),
        ("endpoints: [", r"e\.yaml: "),
        ("\x00", r"e\.yaml: "),
        ("[" * 5000, r"e\.yaml: "),
        (b"endpoints: \xff\xfe", r"e\.yaml: "),
        *(
            (f"endpoints: [{{name: a, address: '10.0.0.1:80', model: {value}}}]", r"e\.yaml: ")
            for value in UNFIT
        ),
    ],
)
def test_a_wrong_file_is_refused_with_its_name_and_the_field(text: str | bytes, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        load_endpoints(text, source="e.yaml")
    assert str(raised.value).startswith("e.yaml: ")


@pytest.mark.parametrize(
    ("field", "written", "read"),
    [
        ("metrics", "':8002/metrics'", ":8002/metrics"),
        ("metrics", "/metrics", "/metrics"),
        ("role", "prefill", Role.PREFILL),
        ("role", "both", Role.BOTH),
    ],
)
def test_the_metrics_page_on_the_server_and_its_role_are_read(field: str, written: str, read: object) -> None:
    text = f"endpoints: [{{name: a, address: '10.0.0.1:8000', {field}: {written}}}]"
    assert getattr(load_endpoints(text, source="f").endpoints[0], field) == read


def test_a_rank_has_a_front_that_requests_go_to() -> None:
    text = "endpoints: [{{name: a, address: '10.0.0.1:8001', {}}}]"
    (endpoint,) = load_endpoints(text.format("rank: 1, behind: '10.0.0.1:8000'"), source="f").endpoints
    assert (endpoint.rank, str(endpoint.destination)) == (1, "10.0.0.1:8000")
    for wrong in ("behind: '10.0.0.1:8000'", "rank: 1, behind: here", "rank: -1"):
        with pytest.raises(ConfigError, match=r"behind|rank"):
            load_endpoints(text.format(wrong), source="f")
