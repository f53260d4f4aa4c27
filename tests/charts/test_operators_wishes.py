"""The properties that operators expect of charts, from owners of replica counts to a load test."""

from typing import Any

import pytest
import yaml

from tests.charts.rendering import (
    GATEWAY,
    MODEL_SERVER,
    NAMESPACE,
    REPOSITORY,
    Helm,
    HelmError,
    containers,
    of_kind,
    pod_of,
    pod_specs,
)
from tests.reference.pages import METRICS

pytestmark = pytest.mark.cluster

METRIC = {
    "type": "Pods",
    "pods": {"metric": {"name": "waiting"}, "target": {"type": "AverageValue", "averageValue": "4"}},
}
ISSUER = {"name": "letsencrypt", "kind": "ClusterIssuer"}
POOLS = {"model": "m", "pools": [{"name": "a100"}, {"name": "h100"}]}


def kinds(objects: list[Any]) -> set[str]:
    return {each["kind"] for each in objects}


def test_an_autoscaler_owns_the_replicas_of_model_servers(helm: Helm) -> None:
    values = {
        "profile": POOLS,
        "autoscaling": {"enabled": True, "minReplicas": 2, "metrics": [METRIC]},
        "pools": {"h100": {"autoscaling": {"maxReplicas": 8}}},
    }
    objects = helm.render(MODEL_SERVER, values, release="servers")
    scalers = {o["metadata"]["name"]: o["spec"] for o in objects if o["kind"] == "HorizontalPodAutoscaler"}
    deployments = {o["metadata"]["name"]: o["spec"] for o in objects if o["kind"] == "Deployment"}
    assert set(scalers) == set(deployments) == {"servers-model-server-a100", "servers-model-server-h100"}
    assert not [name for name, spec in deployments.items() if "replicas" in spec]
    assert {(s["minReplicas"], s["maxReplicas"]) for s in scalers.values()} == {(2, 4), (2, 8)}
    for name, scaler in scalers.items():
        assert scaler["scaleTargetRef"] == {"apiVersion": "apps/v1", "kind": "Deployment", "name": name}


def test_an_autoscaler_of_the_gateway_takes_other_metrics_than_its_cpu(helm: Helm) -> None:
    objects = helm.render(GATEWAY, {"autoscaling": {"enabled": True, "metrics": [METRIC]}})
    assert of_kind(objects, "HorizontalPodAutoscaler")["spec"]["metrics"] == [METRIC]


def test_keda_follows_pools_saturation_in_place_of_autoscaler_of_its_own(helm: Helm) -> None:
    keda = {"enabled": True, "prometheus": "http://p:9090", "cooldownPeriod": 60}
    scaling = {"enabled": True, "minReplicas": 0, "maxReplicas": 6, "keda": keda}
    objects = helm.render(MODEL_SERVER, {"autoscaling": scaling, "profile": {"servedNames": ["llama"]}})
    assert not [each for each in objects if each["kind"] == "HorizontalPodAutoscaler"]
    (scaled,) = [each for each in objects if each["kind"] == "ScaledObject"]
    (deployment,) = [each for each in objects if each["kind"] == "Deployment"]
    assert scaled["spec"]["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
    bounds = [scaled["spec"][each] for each in ("minReplicaCount", "maxReplicaCount", "cooldownPeriod")]
    assert bounds == [0, 6, 60]
    assert "replicas" not in deployment["spec"], "otherwise helm and KEDA would overwrite each other"
    (trigger,) = scaled["spec"]["triggers"]
    assert trigger["metricType"] == "Value"
    assert trigger["metadata"]["threshold"] == "0.5"
    assert trigger["metadata"]["ignoreNullValues"] == "false", "a lost Prometheus must remove no server"
    series = f'epp_pool_saturation{{namespace="{NAMESPACE}"'
    servers = f'avg_over_time({series},model="llama",pool!=""}}[1m])'
    query = f'max({servers} or clamp_max({series},pool=""}}, 0.5))'
    assert trigger["metadata"]["query"] == query
    assert "epp_pool_saturation" in {spec.name for spec in METRICS}
    behavior = scaled["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    assert behavior["scaleDown"]["stabilizationWindowSeconds"] == 600


def test_pods_say_which_model_they_serve(helm: Helm) -> None:
    def notes(**values: Any) -> str:
        deployment = of_kind(helm.render(MODEL_SERVER, values), "Deployment")
        return str(deployment["spec"]["template"]["metadata"]["annotations"]["prefix-gateway.dev/model"])

    assert notes(profile={"model": "org/llama"}) == "org/llama"
    assert notes(profile={"model": "org/llama", "servedNames": ["llama", "chat"]}) == "llama"
    assert notes(podAnnotations={"prefix-gateway.dev/model": "own"}) == "own"
    assert notes(podAnnotations=None, podLabels=None, commonLabels=None, pools=None) == "Qwen/Qwen3-0.6B"


@pytest.mark.parametrize("chart", [GATEWAY, MODEL_SERVER], ids=["gateway", "server"])
def test_common_labels_the_registry_and_extra_objects_reach_every_object(helm: Helm, chart: Any) -> None:
    values = {
        "commonLabels": {"team": "ml"},
        "global": {"imageRegistry": "mirror.example.com/all"},
        "extraObjects": [
            {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": {"name": "{{ .Release.Name }}-one", "labels": {"team": "ml"}},
            },
            "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: two, labels: {team: ml}}\n",
        ],
    }
    objects = helm.render(chart, values)
    names = {each["metadata"]["name"] for each in objects}
    assert {"gateway-one", "two"} <= names
    unlabelled = [each for each in objects if each["metadata"].get("labels", {}).get("team") != "ml"]
    assert {each["kind"] for each in unlabelled} <= {"CustomResourceDefinition", "Pod"}
    for name, spec in pod_specs(objects):
        for container in containers(spec):
            assert container["image"].startswith("mirror.example.com/all/"), name
            assert "docker.io" not in container["image"]


def test_a_gateway_or_an_ingress_in_front_of_our_envoy(helm: Helm) -> None:
    values = {
        "gateway": {
            "httpRoute": {"enabled": True, "parentRefs": [{"name": "edge"}], "hostnames": ["a.example.com"]}
        },
        "ingress": {"enabled": True, "className": "nginx", "hosts": ["a.example.com"]},
    }
    objects = helm.render(GATEWAY, values)
    (rule,) = of_kind(objects, "HTTPRoute")["spec"]["rules"]
    assert rule["backendRefs"] == [{"name": "gateway-prefix-gateway", "port": 80}]
    (host,) = of_kind(objects, "Ingress")["spec"]["rules"]
    (path,) = host["http"]["paths"]
    service = of_kind(objects, "Service", "gateway-prefix-gateway")
    assert path["backend"]["service"] == {"name": "gateway-prefix-gateway", "port": {"name": "http"}}
    assert service["spec"]["ports"][0]["name"] == "http"
    with pytest.raises(HelmError, match=r"ingress\.enabled: in shape `gateway`"):
        helm.render(GATEWAY, {"shape": "gateway", **values})


def test_cert_manager_makes_the_certificate_that_the_pods_mount(helm: Helm) -> None:
    values = {"tls": {"certManager": {"issuerRef": ISSUER, "dnsNames": ["llm.example.com"]}}}
    objects = helm.render(GATEWAY, values)
    certificate = of_kind(objects, "Certificate")["spec"]
    assert (certificate["issuerRef"], certificate["dnsNames"]) == (ISSUER, ["llm.example.com"])
    deployment = pod_of(objects)
    (volume,) = [v for v in deployment["volumes"] if v["name"] == "tls"]
    assert volume["secret"]["secretName"] == certificate["secretName"]
    assert of_kind(objects, "Service", "gateway-prefix-gateway")["spec"]["ports"][0]["port"] == 443
    with pytest.raises(HelmError, match=r"tls\.certManager\.dnsNames"):
        helm.render(GATEWAY, {"tls": {"certManager": {"issuerRef": ISSUER}}})


def test_cert_manager_makes_the_pickers_certificate_behind_a_gateway(helm: Helm) -> None:
    values = {"shape": "gateway", "gateway": {"tls": {"certManager": {"issuerRef": ISSUER}}}}
    objects = helm.render(GATEWAY, values)
    certificate = of_kind(objects, "Certificate")["spec"]
    assert f"gateway-prefix-gateway.{NAMESPACE}.svc" in certificate["dnsNames"]
    made = [o["metadata"]["name"] for o in objects if o["kind"] == "Secret"]
    assert certificate["secretName"] not in made, "cert-manager's, and nobody else's"


def test_models_stay_on_a_claim_that_the_chart_makes(helm: Helm) -> None:
    values = {"vllm": {"cache": {"claim": {"create": True, "size": "300Gi"}}}}
    objects = helm.render(MODEL_SERVER, values, release="servers")
    claim = of_kind(objects, "PersistentVolumeClaim")
    assert claim["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    assert claim["spec"]["resources"]["requests"]["storage"] == "300Gi"
    pod = of_kind(objects, "Deployment")["spec"]["template"]["spec"]
    (volume,) = [v for v in pod["volumes"] if v["name"] == "cache"]
    assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]


def test_envoy_gets_variables_and_volumes_of_the_operators(helm: Helm) -> None:
    values: dict[str, Any] = {
        "envoy": {
            "extraEnv": [{"name": "KEYS", "value": "/keys"}, {"name": "UNSET", "value": None}],
            "volumes": [{"name": "keys", "secret": {"secretName": "keys"}}],
            "volumeMounts": [{"name": "keys", "mountPath": "/keys", "readOnly": True}],
        },
        "picker": {"extraEnv": [{"name": "UNSET", "value": None}]},
        "loadTest": None,
    }
    pod = pod_of(helm.render(GATEWAY, values))
    (envoy,) = pod["containers"]
    assert envoy["env"] == values["envoy"]["extraEnv"]
    assert values["envoy"]["volumeMounts"][0] in envoy["volumeMounts"]
    assert values["envoy"]["volumes"][0] in pod["volumes"]


def test_a_quota_of_cpu_limits_admits_every_pod_of_the_gateway(helm: Helm) -> None:
    limited = {"resources": {"limits": {"cpu": "1"}}}
    values = dict.fromkeys(("picker", "envoy", "valkey"), limited) | {"loadTest": ON | limited}
    for name, spec in pod_specs(helm.render(GATEWAY, values)):
        assert all("cpu" in each["resources"]["limits"] for each in containers(spec)), name


def test_services_take_the_families_of_addresses_that_are_asked_for(helm: Helm) -> None:
    values = {"service": {"ipFamilyPolicy": "PreferDualStack", "ipFamilies": ["IPv6", "IPv4"]}}
    services = [o["spec"] for o in helm.render(GATEWAY, values) if o["kind"] == "Service"]
    assert len(services) == 3
    assert {s["ipFamilyPolicy"] for s in services} == {"PreferDualStack"}


def test_monitors_take_relabelings(helm: Helm) -> None:
    rule = {"sourceLabels": ["pod"], "targetLabel": "instance"}
    monitor = {"enabled": True, "relabelings": [rule], "metricRelabelings": [rule]}
    objects = helm.render(GATEWAY, {"monitoring": {"serviceMonitor": monitor}})
    ends = of_kind(objects, "ServiceMonitor")["spec"]["endpoints"]
    assert all(end["relabelings"][-1] == rule and rule in end["metricRelabelings"] for end in ends)
    assert len(ends) == 2
    objects = helm.render(MODEL_SERVER, {"monitoring": {"podMonitor": monitor}})
    (end,) = of_kind(objects, "PodMonitor")["spec"]["podMetricsEndpoints"]
    assert end["relabelings"] == end["metricRelabelings"] == [rule]


def test_the_roles_to_view_or_edit_a_namespace_include_its_policies(helm: Helm) -> None:
    view, edit, _ = yaml.safe_load_all((REPOSITORY / "deploy" / "crds" / "roles.yaml").read_text())
    assert view["rules"][0]["verbs"] == ["get", "list", "watch"]
    assert "rbac.authorization.k8s.io/aggregate-to-view" not in edit["metadata"]["labels"]
    assert "ClusterRole" not in kinds(helm.render(GATEWAY, {}))


ON = {"enabled": True, "image": {"repository": "registry.example/load"}}


def container(made: dict[str, Any]) -> dict[str, Any]:
    (found,) = containers(made["spec"]["template"]["spec"])
    return found


def test_job_loads_the_releases_own_service_and_is_never_one_of_its_pods(helm: Helm) -> None:
    assert "Job" not in kinds(helm.render(GATEWAY))
    objects = helm.render(GATEWAY, {"loadTest": ON})
    made = of_kind(objects, "Job")
    service = of_kind(objects, "Service", "gateway-prefix-gateway")
    args = container(made)["args"]
    host = args[args.index("--host") + 1]
    assert host == f"http://gateway-prefix-gateway:{service['spec']['ports'][0]['port']}"
    labels = made["spec"]["template"]["metadata"]["labels"]
    assert not service["spec"]["selector"].items() <= labels.items()
    objects = helm.render(GATEWAY, {"loadTest": ON, "tls": {"secretName": "certificate"}})
    assert "https://gateway-prefix-gateway:443" in container(of_kind(objects, "Job"))["args"]
