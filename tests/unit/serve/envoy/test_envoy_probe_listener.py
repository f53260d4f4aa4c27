"""The listener for probes and Prometheus: two pages, read-only."""

from __future__ import annotations

from epp.serve.envoy import probe_listener
from tests.unit.serve.envoy.configs import a_config

CONFIG = a_config(status="0.0.0.0:9902", admin="127.0.0.1:9901")


def test_two_pages_can_be_read_and_nothing_else() -> None:
    (chain,) = probe_listener.listener(CONFIG)["filter_chains"]
    (http,) = chain["filters"]
    (host,) = http["typed_config"]["route_config"]["virtual_hosts"]
    *pages, last = host["routes"]
    assert [page["match"]["path"] for page in pages] == ["/ready", "/stats/prometheus"]
    for page in pages:
        assert page["match"]["headers"] == [{"name": ":method", "string_match": {"exact": "GET"}}]
    assert last == {"match": {"prefix": "/"}, "direct_response": {"status": 404}}


def test_probes_get_through_when_clients_have_taken_every_connection() -> None:
    made = probe_listener.listener(CONFIG)
    assert made["ignore_global_conn_limit"]
    assert made["address"]["socket_address"] == {"address": "0.0.0.0", "port_value": 9902}


def test_the_pages_come_from_the_admin_page_of_this_envoy() -> None:
    cluster = probe_listener.admin(CONFIG)
    (locality,) = cluster["load_assignment"]["endpoints"]
    (endpoint,) = locality["lb_endpoints"]
    assert endpoint["endpoint"]["address"]["socket_address"] == {"address": "127.0.0.1", "port_value": 9901}
