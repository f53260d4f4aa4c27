"""Servers that span several nodes: the values that the LeaderWorkerSet of the chart model-server sets for
leaders and for workers.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.charts.rendering import MODEL_SERVER, Helm, of_kind, value_set

pytest_plugins = ["tests.charts.fixtures"]
pytestmark = pytest.mark.cluster

POOL = "prefix-gateway.dev/pool"


def parts(helm: Helm) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the templates of the leader and of the worker."""
    found = of_kind(helm.render_set(value_set("servers-multi-node")), "LeaderWorkerSet")
    template = found["spec"]["leaderWorkerTemplate"]
    return template["leaderTemplate"], template["workerTemplate"]


def server_of(template: dict[str, Any]) -> dict[str, Any]:
    (server,) = (c for c in template["spec"]["containers"] if c["name"] == "server")
    return dict(server)


def test_a_server_is_a_group_and_replicas_count_groups(helm: Helm) -> None:
    objects = helm.render_set(value_set("servers-multi-node"))
    spec = of_kind(objects, "LeaderWorkerSet")["spec"]
    assert (spec["replicas"], spec["leaderWorkerTemplate"]["size"]) == (3, 4)
    assert "Deployment" not in {o["kind"] for o in objects}


def test_only_the_leader_is_an_endpoint(helm: Helm) -> None:
    leader, worker = parts(helm)
    assert leader["metadata"]["labels"][POOL] == "default"
    assert POOL not in worker["metadata"]["labels"]
    assert [p["name"] for p in server_of(leader)["ports"]] == ["http"]
    assert not {"ports", "readinessProbe", "livenessProbe", "startupProbe"} & set(server_of(worker))
    assert [c["name"] for c in leader["spec"]["initContainers"]] == ["lora-sync"]
    assert "initContainers" not in worker["spec"]


def test_the_role_of_a_pool_is_llm_ds_label_on_its_pods(helm: Helm) -> None:
    values = {
        "role": "decode",
        "profile": {"pools": [{"name": "a"}, {"name": "b"}]},
        "pools": {"b": {"role": "prefill"}},
    }
    made = {
        o["metadata"]["name"][-1]: o["spec"]["template"]["metadata"]["labels"].get("llm-d.ai/role")
        for o in helm.render(MODEL_SERVER, values)
        if o["kind"] == "Deployment"
    }
    assert made == {"a": "decode", "b": "prefill"}


def test_leader_and_worker_are_one_vllm(helm: Helm) -> None:
    leader, worker = map(server_of, parts(helm))
    ranks = ["--nnodes", "4", "--node-rank", "$(LWS_WORKER_INDEX)", "--master-addr", "$(LWS_LEADER_ADDRESS)"]
    assert leader["args"][-len(ranks) :] == ranks
    assert worker["args"] == [*leader["args"], "--headless"]
    assert (
        leader["resources"]
        == worker["resources"]
        == {
            "requests": {"cpu": "4", "memory": "16Gi"},
            "limits": {"nvidia.com/gpu": 8},
        }
    )


def test_a_worker_that_terminates_waits_for_its_leader(helm: Helm) -> None:
    leader, worker = map(server_of, parts(helm))
    assert leader["lifecycle"] == worker["lifecycle"]
    assert {"name": "DRAIN_HOST", "value": "$(LWS_LEADER_ADDRESS)"} in worker["env"]
    assert "DRAIN_HOST" not in {each["name"] for each in leader["env"]}


def test_the_pods_of_a_server_may_speak_to_each_other(helm: Helm) -> None:
    objects = helm.render_set(value_set("servers-multi-node"))
    (rule,) = of_kind(objects, "NetworkPolicy")["spec"]["ingress"]
    worker = parts(helm)[1]["metadata"]["labels"]
    selectors = [each["podSelector"]["matchLabels"] for each in rule["from"]]
    assert any(wanted.items() <= worker.items() for wanted in selectors)


def test_an_autoscaler_scales_whole_servers(helm: Helm) -> None:
    values = {
        "multiNode": {"enabled": True},
        "autoscaling": {"enabled": True, "keda": {"enabled": True, "prometheus": "http://p:9090"}},
    }
    objects = helm.render(MODEL_SERVER, values)
    target = of_kind(objects, "ScaledObject")["spec"]["scaleTargetRef"]
    assert (target["kind"], target["apiVersion"]) == ("LeaderWorkerSet", "leaderworkerset.x-k8s.io/v1")
    assert "replicas" not in of_kind(objects, "LeaderWorkerSet")["spec"]
