"""Policies as people write them: which are accepted, and the messages for mistakes. That every number has a
bound is a test of the CRD (tests/unit/docs/test_crd.py).
"""

import msgspec
import pytest

from epp.base.errors import ConfigError
from epp.config.policy import API_VERSION, DEFAULT_POLICY, KIND, PolicySpec, check_spec, load_policy, only_set

HEAD = f"apiVersion: {API_VERSION}\nkind: {KIND}\nmetadata: {{name: test}}\n"


def test_fields_that_differ_from_the_defaults_read_back_as_the_same_spec() -> None:
    spec = check_spec({"rule": "affinity", "gain": {"minMatchTokens": 128}, "sampling": {}})
    assert only_set(spec) == {"rule": "affinity", "gain": {"minMatchTokens": 128}}
    assert check_spec(only_set(spec)) == spec
    assert only_set(check_spec({"flow": {"mode": "Hold", "models": {}}})) == {"flow": {"mode": "Hold"}}


def test_an_empty_spec_is_the_default_policy() -> None:
    assert load_policy(HEAD, source="p.yaml").spec == DEFAULT_POLICY.spec


def test_former_names_of_fields_work_and_a_warning_names_the_new_ones() -> None:
    former = check_spec({"failures": {"shareToLeaveOut": 0.3, "shareToEject": 0.7, "maxLeftOutShare": 0.25}})
    assert (former.failures.share_to_eject, former.failures.max_ejected_share) == (0.3, 0.25)
    assert check_spec(only_set(former)) == former
    warnings = [line.split(";")[0] for line in former.failures.former_names()]
    assert warnings == [
        "failures.shareToLeaveOut: its name is shareToEject",
        "failures.maxLeftOutShare: its name is maxEjectedShare",
    ]
    assert list(PolicySpec().failures.former_names()) == []


def test_metadata_fields_that_kubernetes_adds_are_accepted() -> None:
    text = HEAD.replace("{name: test}", "{name: test, namespace: n, generation: 3, uid: abc, labels: {a: b}}")
    metadata = load_policy(text, source="p.yaml").metadata
    assert (metadata.name, metadata.namespace, metadata.generation) == ("test", "n", 3)


def test_sizes_and_times_that_must_not_be_smaller_may_be_equal() -> None:
    scrape = {"intervalSeconds": 9, "staleAfterSeconds": 9}
    spec = check_spec({"chunks": {"sizeBytes": 4096, "laterSizeBytes": 4096}, "scrape": scrape})
    assert (spec.chunks.later_size_bytes, spec.scrape.stale_after_seconds) == (4096, 9)


def test_the_default_policy_limits_the_queue_of_a_server_and_nothing_else() -> None:
    load = PolicySpec().load
    assert load.max_waiting > 0
    assert (load.max_kv_usage, load.max_undone_tokens) == (1.0, 0), "no limit"
    assert load.when_saturated == "LeastLoaded"


def test_a_policy_may_be_written_in_json() -> None:
    text = msgspec.json.encode(DEFAULT_POLICY)
    assert load_policy(text, source="p.json") == DEFAULT_POLICY


@pytest.mark.parametrize(
    ("spec", "field", "why"),
    [
        ("{maxDestinations: 0}", "spec.maxDestinations", ">= 1"),
        ("{sessionHeader: X-Session}", "spec.sessionHeader", "; write "),
        ("{sessionHeader: x-request-id}", "spec", "sessionHeader: `x-request-id` has another meaning"),
        ("{debugHeader: host}", "spec", "debugHeader: `host` has another meaning"),
        ("{targetRef: {}}", "spec.targetRef", "name"),
        ("{targetRef: {name: Pool}}", "spec.targetRef.name", "; write "),
        ("{targetRef: {name: p, group: ''}}", "spec.targetRef", "leave group out"),
        ("3", "spec", "a mapping"),
        ("{gain: {minMatchRatio: 1.5}}", "spec.gain.minMatchRatio", "<= 1"),
        ("{gain: {minMatchRatio: .nan}}", "spec.gain.minMatchRatio", "a number"),
        ("{cost: {prefillTokensPerSecond: 0}}", "spec.cost.prefillTokensPerSecond", "> 0"),
        ("{scrape: {path: metrics}}", "spec.scrape.path", "; write "),
        ("{scrape: {staleAfterSeconds: 8.9, intervalSeconds: 9}}", "spec", "stale between two scrapes"),
        ("{table: {bytesPerToken: .inf}}", "spec.table.bytesPerToken", "<="),
        ("{chunks: {sizeBytes: 2048}}", "spec", "chunks.laterSizeBytes is smaller than chunks.sizeBytes"),
    ],
)
def test_a_mistake_is_refused_with_the_file_the_field_and_the_reason(spec: str, field: str, why: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_policy(HEAD + f"spec: {spec}", source="p.yaml")
    message = str(caught.value)
    assert message.startswith("p.yaml: ")
    assert f"{field}: " in message
    assert why in message


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (HEAD.replace(KIND, "ConfigMap"), "kind"),
        (HEAD.replace("v1alpha1", "v9"), "apiVersion"),
        (HEAD.replace("{name: test}", "{}"), "name"),
        (HEAD + "spce: {}", "spce"),
        ("", "is empty; it needs at least apiVersion, kind, metadata"),
        ("[]", "a mapping"),
        ("a: [", "line"),
        (HEAD + "spec: 2023-99-01", "month"),
        ("\x00", "p.yaml"),
        (b"\xff\xfe\xfa", "p.yaml"),
        (HEAD + "spec: !!python/object:os.system {}", "constructor"),
        ("[" * 2000 + "]" * 2000, "p.yaml"),
    ],
)
def test_a_document_that_is_not_a_policy_is_refused(text: str | bytes, why: str) -> None:
    with pytest.raises(ConfigError, match=r"^p\.yaml: ") as caught:
        load_policy(text, source="p.yaml")
    assert why in str(caught.value)
