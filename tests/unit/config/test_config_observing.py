"""The sections of a policy about scrapes and sampled answers: bounds, and settings in contradiction."""

from __future__ import annotations

import pytest

from epp.base.errors import ConfigError
from epp.config.policy import check_spec, load_policy
from tests.unit.config.test_policy import HEAD


@pytest.mark.parametrize(
    ("spec", "field", "why"),
    [
        ("{scrape: {path: metrics}}", "spec.scrape.path", "regex"),
        ("{scrape: {intervalSeconds: 9}}", "spec", "scrape.staleAfterSeconds is smaller than"),
        ("{scrape: {intervalSeconds: 0.01}}", "spec.scrape.intervalSeconds", ">= 0.05"),
        ("{scrape: {failuresToEject: 0}}", "spec.scrape.failuresToEject", ">= 1"),
        ("{scrape: {maxPageBytes: 1}}", "spec.scrape.maxPageBytes", ">= 1024"),
        ("{sampling: {share: 1.5}}", "spec.sampling.share", "<= 1"),
        ("{sampling: {maxTextBytes: 1}}", "spec.sampling", "`maxTextBytes` was removed"),
    ],
)
def test_a_mistake_in_a_section_names_the_field_and_the_reason(spec: str, field: str, why: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_policy(HEAD + f"spec: {spec}", source="p.yaml")
    assert f"{field}: " in str(caught.value)
    assert why in str(caught.value)


def test_metrics_may_become_stale_when_next_scrape_is_due_but_not_before() -> None:
    scrape = check_spec({"scrape": {"intervalSeconds": 9, "staleAfterSeconds": 9}}).scrape
    assert scrape.interval_seconds == scrape.stale_after_seconds == 9
    with pytest.raises(ConfigError, match="metrics would be stale between two scrapes"):
        check_spec({"scrape": {"intervalSeconds": 9, "staleAfterSeconds": 8.9}})


@pytest.mark.parametrize("share", [0, 1])
def test_no_answer_or_every_answer_can_be_sampled(share: int) -> None:
    assert check_spec({"sampling": {"share": share}}).sampling.share == share
