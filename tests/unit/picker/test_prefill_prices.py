"""Which prompts another endpoint computes, and at which prices."""

import random

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from epp.base.types import Address, Endpoint, EndpointName, Role
from epp.config.policy import Cost, Disaggregation, LoadSettings, PolicySpec
from epp.picker.decision import Prefill
from epp.picker.prefilling import computed_elsewhere
from epp.picker.scheduling.schedule import Choice
from epp.picker.scheduling.snapshot import Roster, Snapshot
from tests.unit.picker.scheduling.snapshots import SeenEndpoint, request_of, snapshot, weighed

SETTINGS = Disaggregation(
    min_uncached_tokens=256, kv_bytes_per_token=1000.0, transfer_bytes_per_second=1e6, overhead_seconds=0.5
)
SPEC = PolicySpec(
    disaggregation=SETTINGS,
    cost=Cost(uncached_token_weight=1.0, stalled_request_weight=0.1),
)


def prefillers(seen: list[SeenEndpoint], role: Role = Role.PREFILL) -> Snapshot:
    shown = snapshot(seen)
    endpoints = [
        Endpoint(EndpointName(name), Address("10.0.0.9", 8000 + n), role=role)
        for n, name in enumerate(shown.roster.names)
    ]
    return replace(shown, roster=Roster(endpoints))


def computed(
    here: SeenEndpoint,
    prefilling: Snapshot,
    cached: list[SeenEndpoint],
    *,
    prompt: int = 4000,
    spec: PolicySpec = SPEC,
) -> tuple[int, Prefill] | None:
    """Return the result for a prompt of which `here` holds `here.cached` tokens."""
    choice = Choice(weighed([here], prompt=prompt), [0], "load")
    request = request_of(cached, prompt=prompt)
    return computed_elsewhere(choice, request, prefilling, spec=spec, rng=random.Random(0))


def late(tokens: int) -> float:
    """Return how much longer a token takes that stands behind so many others."""
    return 1 + tokens / 65_536


def test_the_price_elsewhere_has_the_transfer_of_missing_tokens() -> None:
    idle = [SeenEndpoint("p", backlog=500.0, in_flight=50, cached=1000)]
    chosen = computed(SeenEndpoint("d", in_flight=40, cached=2000), prefillers(idle), idle)
    assert chosen is not None
    place, found = chosen
    assert found.instead_of_s == pytest.approx(2.0 * late(3000) * (1 + 0.1 * 40))
    assert msgspec.json.encode(found), "msgspec writes no numbers of numpy"
    assert found.transfer_s == 0.5 + 2.0
    assert found.cost_s == pytest.approx(0.5 + 3.0 * late(2500) + 2.5), (
        "its backlog, its own 3,000 tokens, the transfer"
    )
    assert (place, found.uncached_tokens) == (0, 3000)


def test_an_endpoint_that_also_answers_stalls_its_answers() -> None:
    both = [SeenEndpoint("b", in_flight=5)]
    found = computed(SeenEndpoint("d", in_flight=90), prefillers(both, Role.BOTH), both)
    assert found is not None
    assert found[1].cost_s == pytest.approx(4.0 * late(2000) * (1 + 0.1 * 5) + 4.5)


@pytest.mark.parametrize(
    ("lacking", "in_flight"), [(255, 1000), (4000, 0)], ids=["too short", "not worth the transfer"]
)
def test_a_prompt_stays_if_moving_it_gains_little_or_costs_more(lacking: int, in_flight: int) -> None:
    idle = [SeenEndpoint("p")]
    here = SeenEndpoint("d", in_flight=in_flight, cached=4000 - lacking)
    assert computed(here, prefillers(idle), idle) is None


def test_endpoints_that_fail_compute_nothing_except_as_a_trial() -> None:
    three = [SeenEndpoint("p"), SeenEndpoint("q", backlog=900.0), SeenEndpoint("r", backlog=500.0)]
    spec = replace(SPEC, load=LoadSettings(max_undone_tokens=800))
    failing = replace(prefillers(three), failing=np.array([True, False, False]))
    here = SeenEndpoint("d", in_flight=90)
    found = computed(here, failing, three, spec=spec)
    assert found is not None
    assert found[0] == 2
    tried = computed(here, replace(failing, trials=[0]), three, spec=spec)
    assert tried is not None
    assert tried[0] == 0
