"""The sections of a policy that the rules and the thresholds read: bounds and defaults."""

from __future__ import annotations

import pytest

from epp.base.errors import ConfigError
from epp.config.policy import PolicySpec, check_spec, load_policy
from tests.unit.config.test_policy import HEAD


@pytest.mark.parametrize(
    ("spec", "field", "why"),
    [
        ("{gain: {minMatchRatio: 1.5}}", "spec.gain.minMatchRatio", "<= 1"),
        ("{gain: {minMatchRatio: .nan}}", "spec.gain.minMatchRatio", "a number"),
        ("{gain: {minMatchTokens: few}}", "spec.gain.minMatchTokens", "a whole number"),
        ("{load: {maxWaitng: 3}}", "spec.load", "maxWaitng"),
        ("{load: {whenSaturated: Drop}}", "spec.load.whenSaturated", "Drop"),
        ("{cost: {prefillTokensPerSecond: 0}}", "spec.cost.prefillTokensPerSecond", "> 0"),
        ("{failures: {shareToLeaveOut: 0}}", "spec.failures.shareToLeaveOut", "> 0"),
        ("{failures: {maxLeftOutShare: 2}}", "spec.failures.maxLeftOutShare", "<= 1"),
        ("{lora: {slotsPerEndpoint: 0}}", "spec.lora.slotsPerEndpoint", ">= 1"),
        ("{prefixHash: {maxLoadRatio: 0.5}}", "spec.prefixHash.maxLoadRatio", ">= 1"),
        ("{load: {retryAfterSeconds: 0}}", "spec.load.retryAfterSeconds", ">= 1"),
        ("{cost: {runningRequestTokens: 50}}", "spec.cost", "`runningRequestTokens` was removed"),
    ],
)
def test_a_mistake_in_a_section_names_the_field_and_the_reason(spec: str, field: str, why: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_policy(HEAD + f"spec: {spec}", source="p.yaml")
    assert f"{field}: " in str(caught.value)
    assert why in str(caught.value)


def test_a_value_may_equal_its_bound() -> None:
    spec = check_spec(
        {
            "gain": {"minMatchTokens": 0, "minMatchRatio": 1},
            "load": {"maxWaiting": 0, "maxKvUsage": 0, "whenSaturated": "Reject"},
            "failures": {"shareToLeaveOut": 1, "maxLeftOutShare": 0, "hangSeconds": 0},
            "cost": {"uncachedTokenWeight": 0, "stalledRequestWeight": 0},
            "prefixHash": {"maxLoadRatio": 1},
        }
    )
    assert (spec.load.max_waiting, spec.failures.hang_seconds, spec.prefix_hash.max_load_ratio) == (0, 0, 1)


def test_the_default_policy_limits_the_queue_of_a_server_and_nothing_else() -> None:
    load = PolicySpec().load
    assert load.max_waiting > 0
    assert load.max_kv_usage == 1.0, "1 means no limit"
    assert load.max_undone_tokens == 0, "0 means no limit"
    assert load.when_saturated == "LeastLoaded"
