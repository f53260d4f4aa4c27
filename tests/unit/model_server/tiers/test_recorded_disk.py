"""The means that were measured on a real disk (docs/tiers.md), compared with the document's factor."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import pytest

_CELLS = Path(__file__).with_name("real_disk_cells.json")


def test_002_5_the_documents_factor_is_reached_in_1_of_36_recorded_cells() -> None:
    """The strongest of three systems (recompute, loading everything, top-k) is divided by the document's
    rules, and by few chunks.
    """
    baselines = ("recompute", "load everything + LFU", "top-k of all heads + LFU")
    document, few, window = "+ importance caching", "+ few chunks", "sinks + window + LFU"
    gains: defaultdict[str, list[float]] = defaultdict(list)
    content = json.loads(_CELLS.read_text())
    for values in content["cells"]:
        taken = dict(zip(content["columns"][4:], values[4:], strict=True))
        strongest = min(taken[name] for name in baselines)
        for name in (document, few):
            gains[name].append(strongest / taken[name])
        assert taken[window] == min(taken.values()), "its answers are worse: docs/tiers.md"
    assert {name: len(found) for name, found in gains.items()} == {document: 36, few: 36}
    assert [gain for gain in gains[document] if gain >= 2.0] == [pytest.approx(2.02, abs=0.01)]
    assert sum(round(gain, 1) >= 2.0 for gain in gains[few]) == 2
