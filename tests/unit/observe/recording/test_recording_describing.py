"""The lines of a recording that describe the policy and the servers."""

from __future__ import annotations

import random

import pytest

from epp.base.types import EndpointMetrics, EndpointName
from epp.config.policy import DEFAULT_POLICY
from epp.observe.recording import tap
from epp.picker.picker import Picker
from epp.picker.prefix_index.secret import HashSecret
from tests.unit.picker.picker_questions import a_picker, ask, endpoints, text


def test_the_opening_says_how_the_picker_cuts_and_routes() -> None:
    picker = a_picker()
    opening = tap.opening_of(picker)
    assert opening.chunk_bytes == picker.table.schedule.chunk_bytes
    assert opening.policy["spec"]["rule"] == picker.policy.spec.rule
    assert opening.hashing == tap.opening_of(a_picker()).hashing
    other = Picker(DEFAULT_POLICY, rng=random.Random(1), secret=HashSecret(b"x" * 32))
    assert opening.hashing != tap.opening_of(other).hashing, (
        "hashes under different secrets cannot be compared"
    )


def test_the_description_of_a_server_has_its_stated_capacity_or_none() -> None:
    picker = a_picker()
    page = EndpointMetrics(scraped_at=1.0, capacity_tokens=100_000, block_size=16)
    picker.observe(EndpointName("b"), page, now=1.0)
    found = {server.name: server for server in tap.servers_of(picker).servers}
    assert list(found) == list("abcd")
    assert found["b"].capacity_tokens == 100_000
    assert found["a"].capacity_tokens is None


@pytest.mark.parametrize(("key", "same"), [(b"x" * 32, True), (b"", False)])
def test_recorders_of_a_picker_with_a_secret_give_a_tenant_the_same_hash(*, key: bytes, same: bool) -> None:
    """Without a secret each recorder has a random key, so that nobody can guess names of tenants."""
    picker = Picker(DEFAULT_POLICY, rng=random.Random(1), secret=HashSecret(key))
    picker.set_endpoints(endpoints("a"), now=0.0)

    def tenant_of() -> str:
        recorder = tap.recorder_of(picker)
        pick = picker.pick(ask(text("one")), now=1.0)
        pick.decision.tenant = "acme"
        recorder.ended(pick, unix_now_s=1.0)
        return recorder.take()[0].tenant

    assert (tenant_of() == tenant_of()) is same
