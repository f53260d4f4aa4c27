"""From pods and ports to endpoints: which pods, names and addresses, and when a cache is cold."""

from collections.abc import Sequence

import pytest

from epp.base.types import Address, Endpoint, Role
from epp.sources.kube.objects import Pod
from epp.sources.kube.pools import Found, pods_of, pool_ports, united
from epp.sources.kube.reflector import Collection
from tests.unit.sources.kube.objects import pod, pool

FoundPods = Collection[Pod, Sequence[Found]]


def discovery(*pods: object, ports: Sequence[int] = (8000,), name: str = "vllm") -> FoundPods:
    made = pods_of(name, pool(*ports).spec)
    made.replace(pods)  # type: ignore[arg-type]  # pods as `pod` makes them
    return made


def endpoints(*pods: FoundPods) -> Sequence[Endpoint]:
    made = united([each.found for each in pods])
    assert len({e.name for e in made}) == len(made) == len({e.address for e in made})
    return made


def shown(found: FoundPods) -> list[str]:
    return [f"{e.name} {e.address}" for e in endpoints(found)]


def test_a_ready_pod_is_an_endpoint_on_every_target_port() -> None:
    found = discovery(pod("a", "10.0.0.1"), pod("b", "10.0.0.2"), ports=(8000, 8001))
    assert shown(found) == [
        "a:8000 10.0.0.1:8000",
        "a:8001 10.0.0.1:8001",
        "b:8000 10.0.0.2:8000",
        "b:8001 10.0.0.2:8001",
    ]


@pytest.mark.parametrize(
    "other",
    [
        pod("b", "10.0.0.2", ready=False),
        pod("b", "10.0.0.2", deleted="2026-01-01T00:00:00Z"),
        pod("b"),
        pod("b", "not-an-address"),
    ],
    ids=["not ready", "terminating", "without an address", "with nonsense for an address"],
)
def test_a_pod_that_cannot_serve_is_no_endpoint(other: object) -> None:
    assert shown(discovery(pod("a", "10.0.0.1"), other)) == ["a:8000 10.0.0.1:8000"]


def test_a_pod_starts_until_its_startup_probe_has_passed() -> None:
    found = discovery(pod("a", "10.0.0.1", ready=False, started=False))
    assert found.found == {"a": ()}
    assert found.put(pod("a", "10.0.0.1", ready=False))
    assert found.found == {}
    found.put(pod("a", "10.0.0.1", ready=False, started=False, state="waiting"))
    assert found.found == {}, "it waits after a crash"
    found.put(pod("a", "10.0.0.1", ready=False, started=False, restarts={"vllm": 1}))
    assert found.found == {}, "it may crash again"


def test_a_ready_pod_on_a_silent_node_stays() -> None:
    """The node controller takes Ready away and leaves the rest of the status as it was."""
    lost = pod("a", "10.0.0.1", ready=False, parts={"ContainersReady": True, "example.com/gate": True})
    assert shown(discovery(lost)) == ["a:8000 10.0.0.1:8000"]
    for parts in ({"ContainersReady": False, "gate": True}, {"ContainersReady": True, "gate": False}):
        assert shown(discovery(pod("a", "10.0.0.1", ready=False, parts=parts, gates=["gate"]))) == []


def test_an_update_without_a_relevant_field_changes_nothing() -> None:
    found = discovery(pod("a", "10.0.0.1"))
    assert not found.put(pod("a", "10.0.0.1", annotations={"seen-at": "later"}))


def test_another_address_is_another_endpoint_of_the_same_name() -> None:
    found = discovery(pod("a", "10.0.0.1"))
    assert found.put(pod("a", "10.0.0.9"))
    assert shown(found) == ["a:8000 10.0.0.9:8000"]


def incarnation(found: object, port: int = 8000) -> str:
    (endpoint,) = endpoints(discovery(found, ports=(port,)))
    return endpoint.incarnation


@pytest.mark.parametrize("declared", [True, False])
def test_a_restart_counts_for_its_ports_and_for_those_nobody_declares(*, declared: bool) -> None:
    ports = {"vllm": [8000], "exporter": [9100]} if declared else {"vllm": [], "exporter": []}
    before = incarnation(pod("a", "10.0.0.1", ports=ports))
    assert before != incarnation(pod("a", "10.0.0.1", ports=ports, restarts={"vllm": 1}))
    beside = incarnation(pod("a", "10.0.0.1", ports=ports, restarts={"exporter": 1}))
    assert (before == beside) is declared


def test_pickers_of_two_releases_name_a_process_in_the_same_way() -> None:
    assert incarnation(pod("a", "10.0.0.1", uid="u")) == "u/0/containerd://a-vllm-0"
    any_of_two = pod("a", "10.0.0.1", uid="u", ports={"vllm": [], "exporter": []})
    assert incarnation(any_of_two) == "u/exporter=0/containerd://a-exporter-0 vllm=0/containerd://a-vllm-0"


@pytest.mark.parametrize(("ip", "host"), [("10.0.0.1", "10.0.0.1"), ("fd00:0:0::1", "fd00::1")])
def test_a_pod_is_reached_at_its_primary_address(ip: str, host: str) -> None:
    (endpoint,) = endpoints(discovery(pod("a", ip, "10.0.0.9")))
    assert endpoint.address == Address(host, 8000)


def test_the_younger_of_two_pods_with_one_address_is_the_endpoint() -> None:
    old = pod("on-a-dead-node", "10.0.0.1", created="2026-01-01T00:00:00Z")
    new = pod("new", "10.0.0.1", created="2026-01-02T00:00:00Z")
    assert shown(discovery(new, old)) == ["new:8000 10.0.0.1:8000"]
    twin = pod("twin", "10.0.0.1", created="2026-01-02T00:00:00Z")
    assert shown(discovery(new, twin)) == shown(discovery(twin, new)), "all pickers choose the same"


def test_annotations_state_model_and_adapters() -> None:
    annotations = {
        "prefix-gateway.dev/model": "meta-llama/Llama-3.1-8B",
        "prefix-gateway.dev/adapters": "sql, legal,",
    }
    (endpoint,) = endpoints(discovery(pod("a", "10.0.0.1", annotations=annotations)))
    assert endpoint.model == "meta-llama/Llama-3.1-8B"
    assert endpoint.adapters == {"sql", "legal"}


def test_annotated_names_that_no_request_could_use_are_ignored() -> None:
    annotations = {
        "prefix-gateway.dev/model": "m" * 1025,
        "prefix-gateway.dev/adapters": ",".join(["sql", "x" * 1025, *(f"a{n}" for n in range(10_000))]),
    }
    (endpoint,) = endpoints(discovery(pod("a", "10.0.0.1", annotations=annotations)))
    assert endpoint.model == ""
    assert "sql" in endpoint.adapters
    assert len(endpoint.adapters) == 4095
    assert max(map(len, endpoint.adapters)) <= 1024


@pytest.mark.parametrize(
    ("text", "used"),
    [
        (":8002/metrics", ":8002/metrics"),
        ("/prometheus/metrics", "/prometheus/metrics"),
        (":8002", ":8002"),
        ("http://elsewhere/metrics", ""),
        (":8002@elsewhere/metrics", ""),
        (":0/metrics", ""),
        ("/metrics?x=1 HTTP/1.1", ""),
    ],
)
def test_an_annotation_states_where_the_metrics_page_is_on_the_pod_itself(text: str, used: str) -> None:
    (endpoint,) = endpoints(discovery(pod("a", "10.0.0.1", annotations={"prefix-gateway.dev/metrics": text})))
    assert endpoint.metrics == used


@pytest.mark.parametrize(
    ("text", "role"),
    [
        ("prefill", Role.PREFILL),
        ("decode", Role.DECODE),
        ("both", Role.BOTH),
        ("prefill-decode", Role.BOTH),
        ("encode-prefill", Role.PREFILL),
        ("encode-prefill-decode", Role.BOTH),
        ("encode", Role.ENCODE),
        ("a-word-of-tomorrow", Role.UNSAID),
    ],
)
def test_the_label_of_llm_d_states_the_role(text: str, role: Role) -> None:
    (endpoint,) = endpoints(discovery(pod("a", "10.0.0.1", labels={"llm-d.ai/role": text})))
    assert endpoint.role is role


def test_a_pod_whose_role_changes_is_another_endpoint() -> None:
    found = discovery(pod("a", "10.0.0.1"))
    assert [e.role for e in endpoints(found)] == [Role.UNSAID]
    assert found.put(pod("a", "10.0.0.1", labels={"llm-d.ai/role": "prefill"}))
    assert [e.role for e in endpoints(found)] == [Role.PREFILL]


@pytest.mark.parametrize(("text", "front"), [("8000", 8000), ("", 0), ("no", 0), ("99999", 0)])
def test_an_annotation_makes_the_target_ports_ranks_behind_one_front(text: str, front: int) -> None:
    annotations = {"prefix-gateway.dev/data-parallel-port": text}
    found = discovery(pod("a", "10.0.0.1", annotations=annotations), ports=(8001, 8002))
    made = [(e.address.port, e.rank, e.behind) for e in endpoints(found)]
    behind = Address("10.0.0.1", front) if front else None
    assert made == [(8001, 0 if front else None, behind), (8002, 1 if front else None, behind)]


def test_a_list_replaces_what_was_known_and_an_equal_one_changes_nothing() -> None:
    found = discovery(pod("a", "10.0.0.1"), pod("b", "10.0.0.2"))
    assert found.replace([pod("b", "10.0.0.2"), pod("c", "10.0.0.3")])
    assert shown(found) == ["b:8000 10.0.0.2:8000", "c:8000 10.0.0.3:8000"]
    assert not found.replace([pod("b", "10.0.0.2"), pod("c", "10.0.0.3")])


def test_each_port_of_a_pool_is_read_once() -> None:
    assert pool_ports(pool(8000, 8001, 8000).spec) == (8000, 8001)


def test_endpoints_of_several_pools_name_their_own_pool() -> None:
    a = discovery(pod("x", "10.0.0.1"), name="a")
    b = discovery(pod("y", "10.0.0.2"), name="b", ports=(9000, 9001))
    assert [(e.name, e.pool) for e in endpoints(a, b)] == [("x:8000", "a"), ("y:9000", "b"), ("y:9001", "b")]


def test_a_pod_that_two_pools_select_is_one_endpoint_of_the_first_of_them() -> None:
    both, other = pod("x", "10.0.0.1"), pod("y", "10.0.0.2")
    a, b = discovery(both, name="a"), discovery(both, other, name="b")
    assert [(e.name, e.pool) for e in endpoints(a, b)] == [("x:8000", "a"), ("y:8000", "b")]
    assert [(e.name, e.pool) for e in endpoints(b, a)] == [("x:8000", "b"), ("y:8000", "b")]


def test_of_pods_in_two_pools_the_younger_keeps_their_address_or_name() -> None:
    old = discovery(pod("x", "10.0.0.1"), pod("s", "10.0.0.7"), name="a")
    made = "2026-01-02T00:00:00Z"
    young = discovery(
        pod("y", "10.0.0.1", created=made), pod("s", "10.0.0.8", uid="u2", created=made), name="b"
    )
    shown = [f"{e.name} {e.address} {e.pool}" for e in endpoints(old, young)]
    assert shown == ["s:8000 10.0.0.8:8000 b", "y:8000 10.0.0.1:8000 b"]
