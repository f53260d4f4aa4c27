"""How a picker handles news of its servers: scrapes that fail, and base models that come and go. It keeps
at most as many models as it has servers, and a few models that are gone.
"""

from __future__ import annotations

import gc
import sys

import pytest

from epp.base.types import EndpointMetrics, EndpointName, ModelCard, ModelList
from epp.config.flow import Flow
from epp.config.policy import PolicySpec
from epp.picker.events import Pick
from epp.picker.gate import NO_CLAIM, Gate
from epp.picker.picker import Picker
from tests.unit.picker.picker_questions import a_picker, ask, endpoints, serve, text


def rename(picker: Picker, server: str, model: str, *, now: float) -> None:
    picker.news.take_lists({EndpointName(server): ModelList((ModelCard(model),))}, now=now)


def blocks() -> int:
    gc.collect()
    return sys.getallocatedblocks()


def test_names_on_a_page_stand_for_a_list_that_was_refused_before_it() -> None:
    """Pickers that name a model differently would share neither bounds nor shares of their queues."""
    picker = a_picker(on=endpoints("a"))
    name, page = EndpointName("a"), EndpointMetrics(scraped_at=1.0, models=frozenset({"m"}))
    picker.news.observe(name, page, now=1.0)
    assert picker.fleet.models == {""}, "it was not asked yet"
    picker = a_picker(on=endpoints("a"))
    picker.news.take_lists({name: None}, now=0.0)
    picker.news.observe(name, page, now=1.0)
    assert picker.fleet.models == {"m"}


@pytest.mark.slow
def test_server_that_changes_its_model_all_the_time_leaves_nothing_behind() -> None:
    picker = a_picker(on=endpoints("ab"))
    rename(picker, "b", "m", now=0.0)
    sizes = []
    for n in range(2100):
        if n in (1050, 2099):  # before each of these, as many models have left as the picker may keep
            sizes.append(blocks())
        rename(picker, "a", f"base-{n}", now=float(n))
    assert sizes[1] - sizes[0] < 2500  # without the limit there were 17 for each name
    assert picker.caches.token_estimate("m") is picker.caches.token_estimate("m")


def test_what_a_served_model_taught_stays_while_other_names_come_and_go() -> None:
    picker = a_picker(on=endpoints("ab"))
    rename(picker, "b", "m", now=0.0)
    serve(picker, ask(text("one")), now=1.0)
    learned = picker.caches.token_estimate("m")
    for n in range(1000):
        rename(picker, "a", f"base-{n}", now=2.0)
    assert picker.caches.token_estimate("m") is learned


@pytest.mark.slow
def test_queues_of_models_that_no_server_has_any_more_are_forgotten() -> None:
    """Each queue has its own time series."""
    picker = a_picker(PolicySpec(flow=Flow(mode="Hold")), on=endpoints("a"))
    gate = Gate(picker)
    for n in range(1000):
        rename(picker, "a", f"base-{n}", now=float(n))
        pick = gate.offer(
            ask(text(str(n)), model=f"base-{n}"),
            NO_CLAIM,
            _never,
            size_bytes=10,
            longest_s=10.0,
            now=float(n),
        )
        assert isinstance(pick, Pick)
        picker.end(pick, outcome="ended", now=float(n))
    gate.check_integrity()
    assert len(gate.status(now=1000.0)) < 300


def _never(*_: object) -> None:
    raise AssertionError("nothing waits")
