"""The sections of a policy: bounds, defaults, and settings in contradiction."""

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
        ("{scrape: {path: metrics}}", "spec.scrape.path", "regex"),
        ("{scrape: {intervalSeconds: 9}}", "spec", "scrape.staleAfterSeconds is smaller than"),
        ("{scrape: {intervalSeconds: 0.01}}", "spec.scrape.intervalSeconds", ">= 0.05"),
        ("{scrape: {failuresToEject: 0}}", "spec.scrape.failuresToEject", ">= 1"),
        ("{scrape: {maxPageBytes: 1}}", "spec.scrape.maxPageBytes", ">= 1024"),
        ("{sampling: {share: 1.5}}", "spec.sampling.share", "<= 1"),
        ("{sampling: {maxTextBytes: 1}}", "spec.sampling", "`maxTextBytes` was removed"),
        ("{table: {ttlSeconds: .inf}}", "spec.table.ttlSeconds", "<="),
        ("{chunks: {sizeBytes: 2048}}", "spec", "chunks.laterSizeBytes is smaller than chunks.sizeBytes"),
        ("{chunks: {sizeBytes: 8}}", "spec.chunks.sizeBytes", ">= 16"),
        ("{table: {maxEntries: 10}}", "spec.table.maxEntries", ">= 1000"),
        ("{table: {bytesPerToken: 0.1}}", "spec.table.bytesPerToken", "> 0.1"),
        ("{tiers: {cpuShare: 1.0}}", "spec", "`tiers` was removed"),
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


def test_later_chunks_may_be_as_large_as_the_first() -> None:
    text = HEAD + "spec: {chunks: {sizeBytes: 512, laterSizeBytes: 512}}"
    assert load_policy(text, source="p.yaml").spec.chunks.later_size_bytes == 512


def test_a_larger_first_chunk_needs_larger_later_chunks() -> None:
    """A policy that sets only `sizeBytes` is compared with the default of `laterSizeBytes`."""
    with pytest.raises(ConfigError, match=r"chunks\.laterSizeBytes is smaller than chunks\.sizeBytes"):
        check_spec({"chunks": {"sizeBytes": 4096}})
    assert check_spec({"chunks": {"sizeBytes": 4096, "laterSizeBytes": 4096}}).chunks.size_bytes == 4096


def test_metrics_may_become_stale_when_next_scrape_is_due_but_not_before() -> None:
    scrape = check_spec({"scrape": {"intervalSeconds": 9, "staleAfterSeconds": 9}}).scrape
    assert scrape.interval_seconds == scrape.stale_after_seconds == 9
    with pytest.raises(ConfigError, match="metrics would be stale between two scrapes"):
        check_spec({"scrape": {"intervalSeconds": 9, "staleAfterSeconds": 8.9}})


@pytest.mark.parametrize("share", [0, 1])
def test_no_answer_or_every_answer_can_be_sampled(share: int) -> None:
    assert check_spec({"sampling": {"share": share}}).sampling.share == share
