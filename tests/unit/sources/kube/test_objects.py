"""Objects as the API server writes them: what is read of them, and what is written back."""

from __future__ import annotations

import msgspec
import pytest

from epp.sources.kube.objects import Condition, Pod, PolicyObject, PolicyStatus, Pool

POD = b"""{
  "apiVersion": "v1", "kind": "Pod",
  "metadata": {"name": "a", "uid": "u", "resourceVersion": "7", "managedFields": [{"manager": "kubelet"}],
    "labels": {"app": "vllm", "llm-d.ai/role": "prefill"},
    "annotations": {"prefix-gateway.dev/model": "llama", "prefix-gateway.dev/data-parallel-port": "8000"}},
  "spec": {"containers": [{"name": "vllm", "image": "i", "ports": [{"containerPort": 8000, "protocol": "TCP"}]}],
    "readinessGates": [{"conditionType": "loaded"}], "tolerations": [{"operator": "Exists"}]},
  "status": {"podIP": "10.0.0.1", "podIPs": [{"ip": "10.0.0.1"}, {"ip": "fd00::1"}],
    "conditions": [{"type": "Ready", "status": "True", "lastProbeTime": null}],
    "containerStatuses": [{"name": "vllm", "restartCount": 2, "containerID": "containerd://x", "state": {}}]}
}"""


def test_the_fields_of_a_pod_that_its_endpoints_need_are_read() -> None:
    pod = msgspec.json.decode(POD, type=Pod)
    assert (pod.metadata.name, pod.metadata.resource_version, pod.metadata.labels.role) == (
        "a",
        "7",
        "prefill",
    )
    assert (pod.metadata.annotations.model, pod.metadata.annotations.data_parallel_port) == ("llama", "8000")
    assert pod.metadata.deletion_timestamp is None
    assert [port.container_port for port in pod.spec.containers[0].ports] == [8000]
    assert [gate.condition_type for gate in pod.spec.readiness_gates] == ["loaded"]
    assert (pod.status.pod_ip, [each.ip for each in pod.status.pod_ips]) == (
        "10.0.0.1",
        ["10.0.0.1", "fd00::1"],
    )
    (started,) = pod.status.container_statuses
    assert (started.restart_count, started.container_id) == (2, "containerd://x")


@pytest.mark.parametrize("kind", [Pool, PolicyObject])
def test_an_object_with_nothing_but_a_name_can_be_read(kind: type[Pool | PolicyObject]) -> None:
    assert msgspec.json.decode(b'{"metadata": {"name": "a"}}', type=kind).metadata.name == "a"


def test_an_object_without_metadata_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="metadata"):
        msgspec.json.decode(b"{}", type=Pool)


def test_a_status_is_written_with_the_names_of_kubernetes() -> None:
    status = PolicyStatus(
        observed_generation=3,
        rule="random",
        conditions=(Condition("Accepted", "True"),),
    )
    written = msgspec.to_builtins(status)
    assert written["conditions"][0]["lastTransitionTime"] == ""
    assert set(written) == {"observedGeneration", "rule", "conditions"}
    assert msgspec.convert(written, type=PolicyStatus) == status
