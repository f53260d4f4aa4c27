"""PrefixRoutingPolicies on a real API server: what is refused, what applies, and what the status says."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest

from epp.config.policy import API_VERSION
from epp.config.sections import Kubernetes
from epp.sources.kube.api import Api, ApiError
from epp.sources.kube.objects import PLURAL
from tests.cluster_env.control_plane import ControlPlane
from tests.harness.data_plane import BUFFERED, exchange
from tests.harness.processes import wait_until
from tests.harness.simulated_pool import POOL, install_policy_crd, picker_account, policy_document
from tests.harness.site import Site, running_site

pytestmark = [pytest.mark.cluster]

NONSENSE: Sequence[tuple[str, dict[str, Any], str]] = (
    ("rule", {"rule": "fastest"}, "spec.rule: Unsupported value"),
    ("field", {"load": {"maxWaitng": 3}}, 'unknown field "spec.load.maxWaitng"'),
    ("name", {"targetRef": {"name": "Pool_1"}}, "spec.targetRef.name: Invalid value"),
    ("no-target", {"targetRef": None}, "spec.targetRef: Required value"),
    ("ratio", {"gain": {"minMatchRatio": 1.5}}, "spec.gain.minMatchRatio"),
    ("text", {"gain": {"minMatchTokens": "few"}}, "spec.gain.minMatchTokens"),
    ("chunks", {"chunks": {"sizeBytes": 2048}}, "laterSizeBytes is under sizeBytes"),
    ("scrape", {"scrape": {"intervalSeconds": 9}}, "staleAfterSeconds is under intervalSeconds"),
    ("long", {"scrape": {"path": "/" + "x" * 300}}, "spec.scrape.path: Too long"),
)


def test_the_api_server_refuses_nonsense_and_says_what_waits(cluster: ControlPlane, namespace: str) -> None:
    install_policy_crd(cluster)
    for name, spec, reason in NONSENSE:
        fault = cluster.kubectl_fails(
            "apply", "-n", namespace, "-f", "-", stdin=policy_document(name, **spec)
        )
        assert reason in fault, f"{name}: {fault}"
    cluster.kubectl("apply", "-n", namespace, "-f", "-", stdin=policy_document("good", rule="affinity"))
    shown = cluster.kubectl("get", "prp", "-n", namespace, "-o", "wide", "--no-headers").split()
    assert (*shown[:2], *shown[3:]) == ("good", "Unknown", POOL, "Unknown", "Pending"), "beside its age"


async def route_requests(site: Site, count: int) -> None:
    """Send this many requests through the picker, as Envoy sends them, and wait until they are over."""
    folder = site.picker.process.stderr.parent
    async with grpc.aio.insecure_channel(f"unix:{folder}/picker.sock") as channel:
        for n in range(count):
            body = json.dumps({"model": "m", "prompt": f"{n % 5}" * 4000}).encode()
            async with exchange(channel, mode=BUFFERED) as one:
                await one.send(body, headers=[("x-request-id", f"r{n}")])
                await one.respond(b"{}")
    await site.picker.idle()


async def test_a_policy_is_applied_while_it_runs_and_its_status_says_so(
    cluster: ControlPlane, namespace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with running_site(cluster, namespace, tmp_path, pods=3) as site:
        site.policies.apply("p", rule="affinity")
        await site.wait_policy("p", rule="affinity")
        await site.policies.wait_conditions("p", "Accepted=True/Accepted@1", "Programmed=True/Programmed@1")
        await route_requests(site, 5)
        entries = sum(e["table_entries"] for e in (await site.endpoints()).values())
        assert entries > 0

        delays = []
        for rule in ("random", "least-load", "round-robin"):
            site.policies.apply("p", rule=rule)
            applied = time.monotonic()
            await site.wait_policy("p", rule=rule)
            delays.append(time.monotonic() - applied)
        with capsys.disabled():
            shown = ", ".join(f"{delay:.2f}" for delay in delays)
            print(f"\nseconds from kubectl apply until a changed policy routes: {shown}")
        assert sum(e["table_entries"] for e in (await site.endpoints()).values()) == entries, "kept"

        await site.policies.wait_conditions("p", "Accepted=True/Accepted@4", "Programmed=True/Programmed@4")
        await site.policies.delete("p")
        await site.wait_policy("default")


async def test_a_subtle_mistake_is_refused_by_status_and_changes_nothing(
    cluster: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    async with running_site(cluster, namespace, tmp_path, pods=1) as site:
        site.policies.apply("p", rule="affinity")
        await site.wait_policy("p", rule="affinity")
        await site.policies.wait_conditions("p", "Accepted=True/Accepted@1", "Programmed=True/Programmed@1")
        site.policies.apply("p", rule="random", sessionHeader="host")
        await site.policies.wait_conditions("p", "Accepted=False/Invalid@2", "Programmed=False/Invalid@2")
        status = (await site.policies.read("p"))["status"]
        assert "sessionHeader: `host` has another meaning" in status["conditions"][0]["message"]
        assert status["conditions"][1]["message"] == "generation 1 of this policy routes"
        await site.wait_policy("p", rule="affinity")
        assert await site.picker.metric("epp_kubernetes_policies", state="refused") == 1

        # A picker that starts now never received the accepted spec: it reads the spec from the status.
        async with site.replica("later") as later:

            async def caught_up() -> bool:
                return bool((await later.page("policy"))["metadata"]["name"] == "p")

            await wait_until(caught_up, what="the later picker routes by the policy")
            assert (await later.page("policy"))["spec"]["rule"] == "affinity"


async def test_two_replicas_write_each_status_once_and_one_alone_suffices(
    cluster: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    async with running_site(cluster, namespace, tmp_path, pods=1) as site, site.replica("second") as second:
        site.policies.apply("p", rule="affinity")
        await site.policies.wait_conditions("p", "Accepted=True/Accepted@1", "Programmed=True/Programmed@1")
        version = (await site.policies.read("p"))["metadata"]["resourceVersion"]
        assert await version_after_a_while(site) == version
        second.process.kill()
        site.policies.apply("p", rule="random")
        await site.policies.wait_conditions("p", "Accepted=True/Accepted@2", "Programmed=True/Programmed@2")


async def test_all_workers_of_one_pod_route_by_the_policy(
    cluster: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    async with running_site(cluster, namespace, tmp_path, pods=2, workers=2) as site:
        site.policies.apply("p", rule="affinity")
        await site.policies.wait_conditions("p", "Accepted=True/Accepted@1", "Programmed=True/Programmed@1")
        await site.picker.wait_metric_is("epp_policy_info", 2, policy="p", rule="affinity")
        assert await site.picker.metric("epp_endpoint_ready") == 4


async def version_after_a_while(site: Site) -> str:
    """Return the version of policy p after another policy has got its status, a few looks later."""
    for name in ("q", "r", "s"):
        site.policies.apply(name, rule="random")
        await site.policies.wait_conditions(
            name, "Accepted=False/Conflicted@1", "Programmed=False/Conflicted@1"
        )
    return str((await site.policies.read("p"))["metadata"]["resourceVersion"])


Requests = Sequence[tuple[str, str, object]]
"""Method, path and body."""


def of_the_picker(namespace: str) -> Requests:
    """One request of each kind that the picker sends."""
    here = f"namespaces/{namespace}"
    policies = f"/apis/{API_VERSION}/{here}/{PLURAL}"
    pools = f"/apis/inference.networking.k8s.io/v1/{here}/inferencepools"
    return (
        ("GET", f"/api/v1/{here}/pods?limit=1", None),
        ("GET", f"{pools}?fieldSelector=metadata.name%3D{POOL}", None),
        ("GET", policies, None),
        ("PATCH", f"{policies}/p/status", {"status": {"observedGeneration": 1}}),
    )


def not_the_pickers_business(namespace: str) -> Requests:
    here, there = f"namespaces/{namespace}", "namespaces/default"
    pools = f"/apis/inference.networking.k8s.io/v1/{here}/inferencepools"
    policies = f"/apis/{API_VERSION}/{here}/{PLURAL}"
    rewrites = f"/apis/llm-d.ai/v1alpha2/{here}/inferencemodelrewrites"
    leases = f"/apis/coordination.k8s.io/v1/{here}/leases"
    role = f"/apis/rbac.authorization.k8s.io/v1/{here}/roles/picker"
    return (
        ("GET", f"/api/v1/{here}/secrets", None),
        ("POST", f"/api/v1/{here}/pods/x/exec?command=sh", None),
        ("POST", f"/api/v1/{here}/pods", {"metadata": {"name": "x"}}),
        ("PATCH", f"/api/v1/{here}/pods/x/status", {"status": {}}),
        ("DELETE", f"/api/v1/{here}/pods", None),
        ("GET", f"/api/v1/{there}/pods", None),
        ("GET", "/api/v1/nodes", None),
        ("GET", pools, None),
        ("GET", f"{pools}?fieldSelector=metadata.name%3Danother", None),
        ("PATCH", f"{pools}/{POOL}", {"spec": {}}),
        ("GET", f"/apis/{API_VERSION}/{there}/{PLURAL}", None),
        ("PATCH", f"{policies}/p", {"spec": {"rule": "random"}}),
        ("PATCH", f"{rewrites}/r", {"spec": {"rules": []}}),
        ("POST", policies, {"metadata": {"name": "x"}}),
        ("GET", leases, None),
        ("POST", f"/api/v1/{here}/events", {"metadata": {"name": "x"}}),
        ("PATCH", role, {"rules": [{"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"]}]}),
        ("POST", f"/api/v1/{here}/serviceaccounts/default/token", {"spec": {}}),
    )


async def status_of(api: Api, method: str, path: str, body: object) -> int:
    """Return the status with which a request is refused; 0 for success."""
    try:
        await api.request(method, path, body=body)
    except ApiError as error:
        return error.status
    return 0


async def test_the_service_account_may_do_what_the_picker_does_and_nothing_else(
    cluster: ControlPlane, namespace: str
) -> None:
    """The test uses the account's own token. All other tests here show that the rules suffice, because their
    pickers have no other rights.
    """
    install_policy_crd(cluster)
    account = picker_account(cluster, namespace)
    cluster.kubectl("apply", "-n", namespace, "-f", "-", stdin=policy_document("p"))
    api = await Api.connect(Kubernetes(pool=POOL, kubeconfig=str(account)))

    async def succeeds(method: str, path: str, body: object) -> bool:
        status = await status_of(api, method, path, body)
        assert status in {0, 429}, f"{method} {path}: {status}"
        return status == 0  # a CRD that was just installed may need a moment

    try:
        for request in of_the_picker(namespace):
            await wait_until(lambda request=request: succeeds(*request), what=f"{request} succeeds")  # type: ignore[misc]  # mypy knows no type for such a lambda
        forbidden = not_the_pickers_business(namespace)
        statuses = {request[:2]: await status_of(api, *request) for request in forbidden}
        assert statuses == dict.fromkeys(statuses, 403)
    finally:
        await api.close()
