"""The values of the charts. Each is explained and is in the schema, and senseless values are refused."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.charts import policy_schema, values_table
from tests.charts.rendering import GATEWAY, MODEL_SERVER, Helm, HelmError, behind, of_kind, pod_of, pod_specs

pytestmark = pytest.mark.cluster


def kv_store(args: Sequence[str] = ("--runner", "hf"), **values: Any) -> dict[str, Any]:
    return {"engine": "simulated", "simulated": {"args": list(args), "kvStore": {"enabled": True, **values}}}


LOAD = {"enabled": True, "image": {"repository": "registry.example/load"}}
UNSET = dict.fromkeys(("runAsUser", "runAsGroup", "fsGroup"))
GROUPS = {"multiNode": {"enabled": True}}
POOLS = {"inferencePools": [{"name": "a", "selector": {"app": "a"}}]}
CHARTS = pytest.mark.parametrize("chart", [GATEWAY, MODEL_SERVER], ids=lambda chart: chart.name)


def differences(values: Any, schema: dict[str, Any], path: str = "") -> list[str]:
    """Return the values that the schema does not know, and the fields of the schema that the values do not
    have.
    """
    properties = schema.get("properties")
    if schema.get("additionalProperties") is not False or not isinstance(values, dict) or properties is None:
        return []
    found = [f"{path}.{name}: not in the schema" for name in values.keys() - properties.keys()]
    found += [f"{path}.{name}: not in values.yaml" for name in properties.keys() - values.keys() - {"global"}]
    for name in values.keys() & properties.keys():
        found += differences(values[name], properties[name], f"{path}.{name}")
    return found


def without_removed(schema: Any) -> Any:
    """Return the schema without the values that it lets through only for a message of the chart."""
    if not isinstance(schema, dict):
        return schema
    kept = {k: v for k, v in schema.items() if v != {"description": "removed"}}
    return {key: without_removed(value) for key, value in kept.items()}


@CHARTS
def test_values_are_short_and_the_schema_knows_exactly_them(chart: Path) -> None:
    text = (chart / "values.yaml").read_text()
    assert len(text.splitlines()) < 200
    schema = without_removed(json.loads((chart / "values.schema.json").read_text()))
    values = yaml.safe_load(text)
    for optional in ("profile", "config", "policy"):  # docs/reference-*.md describes their fields
        schema["properties"].pop(optional, None)
        values.pop(optional, None)
    del schema["properties"]["enabled"]  # the chart above writes it
    assert differences(values, schema) == []


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"replicaCount": 3}, "replicaCount"),
        ({"pool": {"targetPorts": [0]}}, "/pool/targetPorts"),
        ({"pool": {"name": "My Pool"}}, "/pool/name"),
        ({"policy": {"spec": {"rule": "affinity"}}}, "/policy"),
        ({"image": {"repository": "Bad Name"}}, "/image/repository"),
        ({"sharing": {"url": "redis://user:secret@redis:6379/0"}}, "/sharing/url"),
        ({"sharing": {"url": "redis.example.com:6379"}}, "/sharing/url"),
        ({"config": {"workers": 0}}, "/config/workers"),
        ({"config": {"lisen": {}}}, "'/config': additional properties 'lisen'"),
        ({"policy": {"rul": "affinity"}}, "'/policy': additional properties 'rul'"),
        ({"policy": {"mode": "DryRun"}}, "/policy/mode"),
        ({"service": {"loadBalancerClass": "internal"}}, "service.type: is ClusterIP"),
        ({"service": {"nodePort": 30080}}, "service.nodePort: means something with"),
        (behind() | {"service": {"type": "NodePort", "nodePort": 30080}}, "remove service.nodePort"),
        ({"sharing": None}, "missing property 'sharing'"),
        ({"models": None}, "write --reset-then-reuse-values instead"),
        ({"monitoring": {"onePage": True}}, "monitoring.onePage: was removed"),
        ({"config": {"holdStreams": False}}, "config.holdStreams: was removed; write gateway.failureMode"),
        ({"config": {"envoy": None}}, "/config/envoy': got null"),
        ({"picker": {"extraEnv": [{"name": "A", "value": 5}]}}, "/picker/extraEnv/0/value"),
        (
            {"config": {"endpointsFile": "/e.yaml"}},
            "config.endpointsFile: the chart's pods take endpoints from `pool`",
        ),
        ({"config": {"policyFile": "/p.yaml"}}, "config.policyFile"),
        ({"shape": "gateway", "tls": {"secretName": "x"}}, "tls.secretName: in shape `gateway`"),
        (behind(httpRoute={"enabled": True}), "gateway.httpRoute.parentRefs: name the Gateway"),
        ({"gateway": {"provider": "istio"}}, "gateway.provider: in shape own-envoy"),
        (behind("traefik"), "provider"),
        (behind("gke") | {"config": {"dialect": "gke"}}, "config.dialect: gateway.provider sets it"),
        (behind("envoy-gateway"), "gateway.httpRoute.enabled: the policies of provider envoy-gateway"),
        (
            behind("envoy-gateway", route=True) | {"pool": {"targetPorts": [8000, 8001]}},
            "pool.targetPorts: a route of provider envoy-gateway",
        ),
        (
            behind("envoy-gateway", route=True, bodies="FullDuplexStreamed"),
            "gateway.bodies: Envoy Gateway accepts FullDuplexStreamed only if",
        ),
        ({"shape": "gateway", "config": {"workers": 2}}, "config.workers: an InferencePool names one port"),
        ({"tls": {"requireClientCertificate": True}}, "tls.requireClientCertificate: needs tls.secretName"),
        (
            behind(tls={"requireClientCertificate": True}),
            "gateway.tls.requireClientCertificate: needs gateway.tls.secretName",
        ),
        ({"sharing": {"existingSecret": "x"}}, "sharing.existingSecret: holds the password for sharing.url"),
        (
            {"valkey": {"existingSecret": "x"}, "sharing": {"enabled": False}},
            "valkey.existingSecret: holds the password of the bundled Valkey, but Valkey is off",
        ),
        ({"autoscaling": {"enabled": True, "minReplicas": 9}}, "autoscaling.minReplicas"),
        ({"inferencePools": [{"name": "a", "targetPorts": [1]}]}, "inferencePools[0]: in shape own-envoy"),
        ({"config": {"kubernetes": {"pools": ["a"]}}}, "config.kubernetes.pools"),
        (
            {"shape": "gateway", "inferencePools": [{"name": "a"}]},
            "inferencePools[0].selector: name the labels",
        ),
        (behind(route=True) | POOLS, "gateway.httpRoute.enabled: a Gateway chooses the InferencePool"),
        (behind("envoy-gateway", route=True) | POOLS, "inferencePools: a route of provider envoy-gateway"),
        ({"image": {"repository": ""}}, "write --set image.repository=registry.example.com/team/picker"),
        ({"networkPolicy": {"monitoring": []}}, "write [{namespaceSelector: {}}] for every pod"),
        ({"config": {"envoy": {"blockedPaths": []}}}, "write config.blockedPaths"),
        ({"config": {"envoy": {"numRetres": 1}}}, "'numRetres' not allowed"),
        ({"crd": {"install": "auto"}}, "apply deploy/crds once"),
        ({"rbac": {"aggregate": False}}, "apply deploy/crds once"),
        ({"commonLabels": {"app.kubernetes.io/name": "mine"}}, "invalid propertyName"),
        ({"loadTest": {"enabled": True}}, "make images push REGISTRY"),
        ({"shape": "gateway", "loadTest": LOAD}, "write its address here"),
    ],
)
def test_the_gateway_refuses_values_and_names_the_field(
    helm: Helm, values: dict[str, Any], field: str
) -> None:
    with pytest.raises(HelmError) as refused:
        helm.render(GATEWAY, values)
    assert field in str(refused.value)


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"profile": {"tensorParallel": 2}}, "tensorParallel"),
        ({"pools": {"h100": {"replicas": 2}}}, "pools.h100: profile.pools has no pool"),
        ({"loraSync": {"enabled": True}}, "loraSync.enabled: needs profile.lora.runtimeUpdates"),
        ({"simulated": {"args": "--num-blocks 4"}}, "/simulated/args"),
        ({"profile": None}, "missing property 'profile'"),
        (kv_store(ratio=0), "/simulated/kvStore/ratio"),
        (kv_store(claimName="My Claim"), "/simulated/kvStore/claimName"),
        ({"autoscaling": {"enabled": True}}, "autoscaling.metrics: name at least one"),
        ({"autoscaling": {"enabled": True, "keda": {"enabled": True}}}, "autoscaling.keda.prometheus"),
        ({"autoscaling": {"enabled": True, "minReplicas": 0}}, "autoscaling.keda"),
        (GROUPS | {"engine": "simulated"}, "engine: vllm"),
        (GROUPS | {"profile": {"extraArgs": ["--nnodes", "2"]}}, "multiNode itself writes --nnodes"),
        ({"multiNode": {"enabled": True, "size": 1}}, "size"),
        (kv_store() | {"engine": "vllm"}, "profile.kvOffload"),
        (kv_store(args=[]), "write args: [--runner, hf]"),
        (kv_store(args=["--runner", "cost"]), "write args: [--runner, hf]"),
        (kv_store(args=["--runner=hf", "--kv-store-ratio=1"]), "use its field"),
        (kv_store(claimName="prefixes"), "write replicas: 1"),
        (
            kv_store(claimName="prefixes")
            | {"replicas": 1, "profile": {"pools": [{"name": "a"}]}, "pools": {"a": {"replicas": 2}}},
            "write replicas: 1",
        ),
        (
            {"extraEnv": [{"name": "PYTHONHASHSEED", "value": "0"}]},
            "extraEnv: the profile itself writes PYTHONHASHSEED",
        ),
        (
            {"engine": "simulated", "simulated": {"image": {"repository": ""}}},
            "write --set simulated.image.repository=registry.example.com/team/model-server",
        ),
    ],
)
def test_the_model_servers_refuse_values_and_name_the_field(
    helm: Helm, values: dict[str, Any], field: str
) -> None:
    with pytest.raises(HelmError) as refused:
        helm.render(MODEL_SERVER, values)
    assert field in str(refused.value)


SWITCHES = {
    GATEWAY: {
        "networkPolicy.enabled": "NetworkPolicy",
        "podDisruptionBudget.enabled": "PodDisruptionBudget",
        "autoscaling.enabled": "HorizontalPodAutoscaler",
        "monitoring.serviceMonitor.enabled": "ServiceMonitor",
        "monitoring.rules.enabled": "PrometheusRule",
        "serviceAccount.create": "ServiceAccount",
        "rbac.create": "Role",
    },
    MODEL_SERVER: {
        "networkPolicy.enabled": "NetworkPolicy",
        "podDisruptionBudget.enabled": "PodDisruptionBudget",
        "serviceAccount.create": "ServiceAccount",
        "monitoring.podMonitor.enabled": "PodMonitor",
    },
}


@CHARTS
def test_every_switch_makes_its_object_and_the_rest_still_serves(helm: Helm, chart: Path) -> None:
    rendered = (helm.render(chart, switched(chart, on=on)) for on in (True, False))
    made, left = ({each["kind"] for each in objects} for objects in rendered)
    assert made - left - {"RoleBinding"} == set(SWITCHES[chart].values())
    assert "Deployment" in left


def switched(chart: Path, *, on: bool) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for switch in SWITCHES[chart]:
        *sections, last = switch.split(".")
        inner = values
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[last] = on
    return values


@pytest.mark.parametrize(
    ("values", "url"),
    [
        ({}, "http://gateway-prefix-gateway.llm.svc:80"),
        ({"tls": {"secretName": "t"}}, "https://gateway-prefix-gateway.llm.svc:443"),
        ({"shape": "gateway", "test": {"url": "http://g.infra.svc:80"}}, "http://g.infra.svc:80"),
        ({"shape": "gateway"}, None),
    ],
)
def test_helm_test_asks_the_address_that_clients_use(
    helm: Helm, values: dict[str, Any], url: str | None
) -> None:
    tests = [each for each in helm.render(GATEWAY, values) if each["kind"] == "Pod"]
    variables = [each for o in tests for each in o["spec"]["containers"][0]["env"]]
    asked = [each["value"] for each in variables if each["name"] == "GATEWAY_URL"]
    assert asked == ([url] if url else [])


def test_long_release_names_stay_within_the_limits_of_kubernetes(helm: Helm) -> None:
    for chart in (GATEWAY, MODEL_SERVER):
        values = {"profile": {"pools": [{"name": "a" * 20}]}} if chart == MODEL_SERVER else {}
        for each in helm.render(chart, values, release="r." + "r" * 51):
            longest = 253 if each["kind"] in {"CustomResourceDefinition", "ClusterRole"} else 63
            assert len(each["metadata"]["name"]) <= longest
            assert each["kind"] != "Service" or "." not in each["metadata"]["name"]


def test_digests_win_over_tags(helm: Helm) -> None:
    digest = "sha256:" + "1" * 64
    spec = pod_of(helm.render(GATEWAY, {"image": {"repository": "r/picker", "tag": "v9", "digest": digest}}))
    assert {c["image"] for c in spec["initContainers"]} == {f"r/picker@{digest}"}


def test_schemas_of_the_policy_and_of_the_configuration_are_the_pickers() -> None:
    text = policy_schema.FILE.read_text()
    assert policy_schema.written(text) == text, "run `make docs`"


@CHARTS
def test_the_table_in_the_readme_has_every_value_and_its_default(chart: Path) -> None:
    text = (chart / "README.md").read_text()
    assert values_table.written(chart) == text, "run `make docs`"
    for name in yaml.safe_load((chart / "values.yaml").read_text()):
        assert f"\n| {name}" in text


def test_users_and_groups_can_be_left_to_the_cluster_in_every_pod(helm: Helm) -> None:
    objects = helm.render(GATEWAY, {"podSecurityContext": UNSET, "loadTest": LOAD})
    objects += helm.render(MODEL_SERVER, {"engine": "simulated", "simulated": {"podSecurityContext": UNSET}})
    specs = dict(pod_specs(objects))
    assert len(specs) == 5
    left = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    for name, spec in specs.items():
        assert spec["securityContext"] == left, name


def test_vllm_has_a_home_that_any_user_may_write(helm: Helm) -> None:
    sidecar = {"profile": {"lora": {"runtimeUpdates": True}}, "loraSync": {"enabled": True}}
    for given in ({}, {"podSecurityContext": UNSET}):
        deployment = of_kind(helm.render(MODEL_SERVER, {"vllm": given, **sidecar}), "Deployment")
        spec = deployment["spec"]["template"]["spec"]
        assert ("runAsUser" in spec["initContainers"][0]["securityContext"]) == (not given)
        (server,) = spec["containers"]
        variables = {each["name"]: each["value"] for each in server["env"]}
        assert (variables["HOME"], variables["USER"]) == ("/tmp", "vllm")
        assert {"/tmp", "/cache"} <= {mount["mountPath"] for mount in server["volumeMounts"]}
        assert variables["HF_HOME"].startswith("/cache/")
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert ("runAsUser" in spec["securityContext"]) == (not given)
    own = {"profile": {"extraEnv": {"HOME": "/home/vllm"}}}
    spec = of_kind(helm.render(MODEL_SERVER, own), "Deployment")["spec"]["template"]["spec"]
    (server,) = spec["containers"]
    assert [each["value"] for each in server["env"] if each["name"] == "HOME"] == ["/home/vllm"]


@pytest.mark.parametrize("values", [{}, {"shape": "gateway"}, {"sharing": {"enabled": False}}])
@pytest.mark.parametrize("secret", ["", "a-secret"])
def test_keys_of_secrets_reach_the_picker_as_files(helm: Helm, values: dict[str, Any], secret: str) -> None:
    sharing = {**values.get("sharing", {}), "signingKeySecret": secret}
    models = {"apiKeySecret": secret}
    objects = helm.render(GATEWAY, {**values, "sharing": sharing, "models": models})
    name = "gateway-prefix-gateway"
    config = yaml.safe_load(of_kind(objects, "ConfigMap", f"{name}-config")["data"]["config.yaml"])
    spec = of_kind(objects, "Deployment", name)["spec"]["template"]["spec"]
    containers = (*spec.get("initContainers", ()), *spec["containers"])
    (picker,) = (each for each in containers if each["name"] == "picker")
    mounts = {mount["name"]: mount["mountPath"] for mount in picker["volumeMounts"]}
    volumes = {v["name"]: v["secret"] for v in spec["volumes"] if "secret" in v}
    files = {
        "signing": config.get("sharing", {}).get("redis", {}).get("signingKeyFile"),
        "models": config.get("models", {}).get("apiKeyFile"),
    }
    for volume, file in files.items():
        if not secret or (volume == "signing" and not sharing.get("enabled", True)):
            assert file is None
            assert volume not in mounts
            continue
        (item,) = volumes[volume]["items"]
        assert volumes[volume]["secretName"] == secret
        assert file == f"{mounts[volume]}/{item['path']}"


def test_labels_annotations_and_priority_reach_every_pod_of_the_gateway(helm: Helm) -> None:
    """A quota may want a priority of every pod. With a mesh's sidecar, the pod of `helm test` never ends."""
    objects = helm.render(
        GATEWAY,
        {
            "podLabels": {"team": "ml", "sidecar.istio.io/inject": "true"},
            "podAnnotations": {"sidecar.istio.io/inject": "true", "linkerd.io/inject": "enabled", "a": "b"},
            "priorityClassName": "high",
            "runtimeClassName": "gvisor",
            "tolerations": [{"operator": "Exists"}],
            "loadTest": LOAD,
        },
    )
    deployments = [each for each in objects if each["kind"] == "Deployment"]
    assert len(deployments) == 2
    assert pod_of(objects)["runtimeClassName"] == "gvisor"
    for each in (*deployments, of_kind(objects, "Job"), of_kind(objects, "Pod")):
        template = each["spec"].get("template", each)
        labels, annotations = template["metadata"]["labels"], template["metadata"]["annotations"]
        assert (labels["team"], annotations["a"]) == ("ml", "b")
        meshed = (labels["sidecar.istio.io/inject"], annotations["sidecar.istio.io/inject"])
        tested = each["kind"] == "Pod"
        assert meshed == (("false", "false") if tested else ("true", "true"))
        assert annotations["linkerd.io/inject"] == ("disabled" if tested else "enabled")
        if each["kind"] != "Job":
            assert template["spec"]["priorityClassName"] == "high"
            assert template["spec"]["tolerations"]


@pytest.mark.parametrize("engine", ["vllm", "simulated"])
def test_settings_that_a_server_needs_of_the_cluster_reach_its_pod(helm: Helm, engine: str) -> None:
    secret = {"name": "BUCKET", "valueFrom": {"secretKeyRef": {"name": "bucket", "key": "url"}}}
    objects = helm.render(
        MODEL_SERVER,
        {
            "engine": engine,
            "extraEnv": [secret, {"name": "UNSET", "value": None}],
            "initContainers": [{"name": "fetch", "image": "r/fetch:1"}],
            "serviceAccount": {"create": True, "annotations": {"example.com/role": "models"}},
            "monitoring": {"podMonitor": {"enabled": True}},
        },
        release="servers",
    )
    spec = of_kind(objects, "Deployment")["spec"]["template"]["spec"]
    assert secret in spec["containers"][0]["env"]
    assert [each["name"] for each in spec["initContainers"]] == ["fetch"]
    account = of_kind(objects, "ServiceAccount")["metadata"]
    assert spec["serviceAccountName"] == account["name"]
    assert account["annotations"] == {"example.com/role": "models"}
    monitor = of_kind(objects, "PodMonitor")["spec"]
    labels = of_kind(objects, "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert monitor["selector"]["matchLabels"].items() <= labels.items()
    assert monitor["podMetricsEndpoints"][0]["port"] in {p["name"] for p in spec["containers"][0]["ports"]}


def test_a_service_account_that_exists_is_named_and_not_made(helm: Helm) -> None:
    objects = helm.render(MODEL_SERVER, {"serviceAccount": {"name": "models"}})
    assert of_kind(objects, "Deployment")["spec"]["template"]["spec"]["serviceAccountName"] == "models"
    assert not [each for each in objects if each["kind"] == "ServiceAccount"]
