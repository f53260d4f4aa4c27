"""The sections of a policy about chunks, tiers and the prefix table: bounds, and what follows from them."""

from __future__ import annotations

import pytest

from epp.base.errors import ConfigError
from epp.config.policy import check_spec, load_policy
from tests.unit.config.test_policy import HEAD


@pytest.mark.parametrize(
    ("spec", "field", "why"),
    [
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


def test_later_chunks_may_be_as_large_as_the_first() -> None:
    text = HEAD + "spec: {chunks: {sizeBytes: 512, laterSizeBytes: 512}}"
    assert load_policy(text, source="p.yaml").spec.chunks.later_size_bytes == 512


def test_a_larger_first_chunk_needs_larger_later_chunks() -> None:
    """A policy that sets only `sizeBytes` is compared with the default of `laterSizeBytes`."""
    with pytest.raises(ConfigError, match=r"chunks\.laterSizeBytes is smaller than chunks\.sizeBytes"):
        check_spec({"chunks": {"sizeBytes": 4096}})
    assert check_spec({"chunks": {"sizeBytes": 4096, "laterSizeBytes": 4096}}).chunks.size_bytes == 4096


def test_a_policy_object_with_a_removed_field_says_what_to_do() -> None:
    with pytest.raises(ConfigError, match="spec: `tiers` was removed; delete it: "):
        check_spec({"tiers": {"cpuShare": 0.9}})
