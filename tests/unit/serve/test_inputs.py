"""The files that the configuration names: read at start, and watched from then on."""

from pathlib import Path

import pytest

from epp.base.errors import ConfigError
from epp.config.policy import DEFAULT_POLICY, Policy
from epp.config.sections import Kubernetes, Listen
from epp.config.settings import Config
from epp.observe.telemetry.metrics import Metrics
from epp.serve.inputs import load_inputs, watchers
from epp.sources.files.endpoints_file import Listed
from tests.harness.certificate import write_tls
from tests.unit.observe.telemetry.records import new_metrics

HEAD = "apiVersion: prefix-gateway.dev/v1alpha1, kind: PrefixRoutingPolicy, metadata: {name: p}"


@pytest.fixture
def kubernetes(tmp_path: Path) -> Kubernetes:
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text("{current-context: c, contexts: [{name: c, context: {namespace: n}}]}")
    return Kubernetes(pool="p", kubeconfig=str(kubeconfig))


def test_policy_file_beside_a_cluster_is_default_policy_and_never_dry_run(
    tmp_path: Path, kubernetes: Kubernetes
) -> None:
    file = policy_file(tmp_path, f"{{{HEAD}, spec: {{mode: DryRun}}}}")
    config = Config(policy_file=file, kubernetes=kubernetes)
    with pytest.raises(ConfigError, match=r"spec\.mode: beside `kubernetes`"):
        load_inputs(config)


def reloads(metrics: Metrics) -> dict[tuple[str, str], float]:
    """Return how often each file was reloaded, with its result."""
    return {
        (sample.labels["source"], sample.labels["result"]): sample.value
        for family in metrics.collect()
        for sample in family.samples
        if sample.name == "epp_reloads_total"
    }


def policy_file(folder: Path, text: str) -> str:
    path = folder / "policy.yaml"
    path.write_text(text)
    return str(path)


@pytest.fixture
def listed(tmp_path: Path) -> Path:
    path = tmp_path / "endpoints.yaml"
    path.write_text(
        '{endpoints: [{name: a, address: "10.0.0.1:8000"}], rewrites: [{models: [gpt], targets: [{model: m}]}]}'
    )
    return path


def test_a_policy_that_is_refused_ends_a_check_and_not_a_picker(
    listed: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = Config(
        endpoints_file=str(listed), policy_file=policy_file(tmp_path, f"{{{HEAD}, spec: {{rule: nonsense}}}}")
    )
    with pytest.raises(ConfigError, match="nonsense"):
        load_inputs(config)
    inputs = load_inputs(config, tolerant=True)
    assert inputs.policy is DEFAULT_POLICY
    assert inputs.policy_text is None, "so the watcher offers the file again"
    assert "the default policy is used until this policy file is corrected" in caplog.text
    assert [endpoint.name for endpoint in inputs.listed.endpoints] == ["a"]


def test_a_refused_list_of_endpoints_also_ends_a_picker(listed: Path) -> None:
    listed.write_text("endpoints: [{name: a}]")
    with pytest.raises(ConfigError, match="address"):
        load_inputs(Config(endpoints_file=str(listed)), tolerant=True)


async def test_a_changed_file_reaches_the_picker_and_the_metrics(listed: Path, tmp_path: Path) -> None:
    policy = policy_file(tmp_path, f"{{{HEAD}}}")
    config = Config(endpoints_file=str(listed), policy_file=policy)
    found: list[Listed] = []
    policies: list[Policy] = []
    metrics = new_metrics()
    by_endpoints, by_policy = watchers(
        config, load_inputs(config), metrics, on_endpoints=found.append, on_policy=policies.append
    )

    async def look() -> None:
        for _ in range(2):
            await by_endpoints.look()
            await by_policy.look()

    await look()
    assert (found, policies) == ([], []), "the content that was read at start is in use already"
    listed.write_text("{endpoints: [], rewrites: [{models: [old], targets: [{model: m}]}]}")
    Path(policy).write_text(f"{{{HEAD}, spec: {{rule: random}}}}")
    await look()
    assert list(found[0].endpoints) == []
    assert set(found[0].rewrites.aliases) == {"old"}
    assert policies[0].spec.rule == "random"
    Path(policy).write_text(f"{{{HEAD}, spec: {{rule: nonsense}}}}")
    await look()
    assert len(policies) == 1, "a refused policy changes nothing"
    assert reloads(metrics) == {
        ("endpoints", "accepted"): 1,
        ("policy", "accepted"): 1,
        ("policy", "refused"): 1,
    }


async def test_in_a_cluster_only_the_certificate_is_watched(kubernetes: Kubernetes, tmp_path: Path) -> None:
    config = Config(kubernetes=kubernetes, listen=Listen(tls=write_tls(tmp_path)))
    (certificate,) = watchers(
        config, load_inputs(config), new_metrics(), on_endpoints=lambda _: None, on_policy=lambda _: None
    )
    Path(certificate.path).write_text("half of a c")
    await certificate.look()
    assert "listen.tls.certFile" in str(certificate.fault)
