"""What people see of the misses: the causes by size."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from msgspec.structs import replace

from epp.config.policy import PolicySpec
from epp.observe.misses.command import table
from epp.observe.misses.explaining import Explaining
from epp.picker.picker import Picker
from tests.unit.observe.misses.answered import served
from tests.unit.picker.picker_questions import a_picker, endpoints, text


async def explained(picker: Picker, explaining: Explaining, *, requests: int) -> dict[str, Any]:
    """Let the loop run until it has looked at the requests, and return the account."""
    looking = asyncio.create_task(explaining.run())
    async with asyncio.timeout(60):
        while explaining.account(1e12)["requests"] < requests:  # noqa: ASYNC110 - nothing tells when
            await asyncio.sleep(0.01)
    looking.cancel()
    return explaining.account(1e12)


async def test_the_answer_names_causes_servers_and_advice() -> None:
    picker = a_picker(PolicySpec(rule="round-robin"), on=endpoints("ab"))
    explaining = Explaining(picker)
    for n in range(2):
        served(picker, text("one", 8192), now=float(n))
    told = await explained(picker, explaining, requests=2)
    assert told["hit_ratio"] == 0.0
    shown = table(told)
    assert "sent to another server" in shown
    assert "-> Nothing to change if time to first token is good" in shown
    assert "a: " in shown


async def test_the_shares_of_the_causes_add_up() -> None:
    picker = a_picker(PolicySpec(), on=endpoints("a"))
    explaining = Explaining(picker)
    before = explaining.account(1e12)
    assert (before["requests"], before["hit_ratio"]) == (0, 0.0)
    for n, prompt in enumerate((text("one", 8192), text("one", 8192), text("two", 8192))):
        served(picker, prompt, now=float(n))
    told = await explained(picker, explaining, requests=3)
    assert 0.3 < told["hit_ratio"] < 0.4
    assert sum(cause["share_of_missed"] for cause in told["causes"]) == pytest.approx(1.0, abs=0.01)
    assert sum(cause["share_of_prompt"] for cause in told["causes"]) == pytest.approx(
        1 - told["hit_ratio"], abs=0.01
    )
    assert told["chunks_followed"] == "1 in 1"


async def test_a_server_that_left_is_named_without_the_share_of_its_cache() -> None:
    picker = a_picker(PolicySpec(rule="round-robin"), on=endpoints("ab"))
    explaining = Explaining(picker)
    for n in range(2):
        served(picker, text("one", 8192), now=float(n))
    told = await explained(picker, explaining, requests=2)
    (server,) = told["causes"][0]["servers"] or told["causes"][1]["servers"]
    assert 0 < server["full"] < 1
    picker.news.set_endpoints([], now=3.0)
    told = explaining.account(1e12)
    (gone,) = told["causes"][0]["servers"] or told["causes"][1]["servers"]
    assert gone == server | {"full": None}


async def test_the_account_is_split_by_policy() -> None:
    picker = a_picker(PolicySpec(), on=endpoints("a"))
    explaining = Explaining(picker)
    served(picker, text("one", 8192), now=0.0)
    metadata = replace(picker.policy.metadata, name="second")
    spec = replace(picker.policy.spec, rule="round-robin")
    picker.set_policy(replace(picker.policy, metadata=metadata, spec=spec), now=1.0)
    served(picker, text("one", 8192), now=2.0)
    told = await explained(picker, explaining, requests=2)
    first, second = told["policies"]
    assert (first["requests"], first["hit_ratio"]) == (1, 0.0)
    assert (second["policy"], second["requests"]) == ("second (round-robin)", 1)
    assert second["hit_ratio"] > 0.9
    assert "second (round-robin): " in table(told)
    assert "second" not in table({**told, "policies": [second]})
