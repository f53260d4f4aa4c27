"""The list of causes that all pages and commands show."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from epp.config.policy import PolicySpec
from epp.config.settings import Config
from epp.observe.misses.accounts import CAUSES
from epp.observe.telemetry.catalog import METRICS

ADVICE = " ".join(cause.advice for cause in CAUSES)


def test_each_cause_has_its_own_name_a_title_and_an_advice() -> None:
    assert len({cause.name for cause in CAUSES}) == len({cause.title for cause in CAUSES}) == len(CAUSES)
    assert all(cause.advice.endswith(".") and not cause.title.endswith(".") for cause in CAUSES)


def test_the_settings_and_metrics_that_an_advice_names_exist() -> None:
    known = [msgspec.json.encode(PolicySpec()).decode(), msgspec.json.encode(Config()).decode()]
    named = re.findall(r"\b([a-z]+)\.([a-z]+[A-Z][A-Za-z]*)", ADVICE)
    assert ("cost", "uncachedTokenWeight") in named
    for section, field in named:
        if section != "sharing":  # a section that is off by default
            assert any(f'"{section}":{{' in text and f'"{field}":' in text for text in known), field
    metrics = set(re.findall(r"\bepp_\w+", ADVICE))
    assert metrics <= {metric.name for metric in METRICS}
    assert metrics


def test_the_page_about_the_hit_rate_explains_every_cause() -> None:
    page = Path("docs/hit-rate.md").read_text()
    assert [cause.name for cause in CAUSES if f"`{cause.name}`" not in page] == []
