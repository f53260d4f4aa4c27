"""What people see of the misses, and the bounded sample that remembers where chunks were sent."""

import asyncio
import random
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from epp.base.types import ChunkHash, EndpointName
from epp.config.policy import PolicySpec
from epp.config.settings import Config
from epp.observe.misses import CAUSES, EVICTED, NEW, TAIL, Misses, Seen, SentPrompt
from epp.serve.admin_commands import table
from tests.invariants.misses import check_seen
from tests.reference.pages import METRICS
from tests.unit.observe.misses.answered import served, watched
from tests.unit.picker.picker_questions import a_picker, text


async def explained(misses: Misses, *, requests: int) -> dict[str, Any]:
    """Let the loop run until it has looked at the requests, and return the account."""
    looking = asyncio.create_task(misses.run())
    async with asyncio.timeout(60):
        while misses.account(1e12)["requests"] < requests:  # noqa: ASYNC110 - nothing tells when
            await asyncio.sleep(0.01)
    looking.cancel()
    return misses.account(1e12)


async def test_the_answer_names_causes_servers_and_advice() -> None:
    picker, misses = watched(PolicySpec(rule="round-robin"), "ab")
    for n in range(2):
        served(picker, text("one", 8192), now=float(n))
    account = await explained(misses, requests=2)
    assert account["hit_ratio"] == 0.0
    shown = table(account)
    assert "sent to another server" in shown
    assert "-> Nothing to change if time to first token is good" in shown
    assert "a: " in shown


async def test_the_shares_of_the_causes_add_up() -> None:
    picker, misses = watched()
    before = misses.account(1e12)
    assert (before["requests"], before["hit_ratio"]) == (0, 0.0)
    for n, prompt in enumerate((text("one", 8192), text("one", 8192), text("two", 8192))):
        served(picker, prompt, now=float(n))
    account = await explained(misses, requests=3)
    assert 0.3 < account["hit_ratio"] < 0.4
    assert sum(cause["share_of_missed"] for cause in account["causes"]) == pytest.approx(1.0, abs=0.01)
    assert sum(cause["share_of_prompt"] for cause in account["causes"]) == pytest.approx(
        1 - account["hit_ratio"], abs=0.01
    )
    assert account["chunks_followed"] == "1 in 1"


async def test_a_server_that_left_is_named_without_the_share_of_its_cache() -> None:
    picker, misses = watched(PolicySpec(rule="round-robin"), "ab")
    for n in range(2):
        served(picker, text("one", 8192), now=float(n))
    account = await explained(misses, requests=2)
    (server,) = account["causes"][0]["servers"] or account["causes"][1]["servers"]
    assert 0 < server["full"] < 1
    picker.news.set_endpoints([], now=3.0)
    account = misses.account(1e12)
    (gone,) = account["causes"][0]["servers"] or account["causes"][1]["servers"]
    assert gone == server | {"full": None}


async def test_the_account_is_split_by_policy() -> None:
    picker, misses = watched()
    served(picker, text("one", 8192), now=0.0)
    metadata = replace(picker.policy.metadata, name="second")
    spec = replace(picker.policy.spec, rule="round-robin")
    picker.set_policy(replace(picker.policy, metadata=metadata, spec=spec))
    served(picker, text("one", 8192), now=2.0)
    account = await explained(misses, requests=2)
    first, second = account["policies"]
    assert (first["requests"], first["hit_ratio"]) == (1, 0.0)
    assert (second["policy"], second["requests"]) == ("second (round-robin)", 1)
    assert second["hit_ratio"] > 0.9
    assert "second (round-robin): " in table(account)
    assert "second" not in table({**account, "policies": [second]})


A, B = EndpointName("a"), EndpointName("b")


def test_all_causes_are_listed_in_order_of_size() -> None:
    misses = Misses(a_picker())
    bucket = misses.bucket(now=0.0)
    bucket.miss(TAIL, 5)
    bucket.miss(EVICTED, 20, server=A)
    bucket.miss(EVICTED, 30, server=B)
    found = misses.account(1e12)["causes"]
    assert [(part["cause"], part["tokens"]) for part in found[:2]] == [("evicted", 50), ("tail", 5)]
    assert [(server["name"], server["tokens"]) for server in found[0]["servers"]] == [("b", 30), ("a", 20)]
    assert [part["servers"] for part in found[1:]] == [[]] * (len(CAUSES) - 1)
    assert {part["cause"] for part in found} == {cause.name for cause in CAUSES}


def test_only_buckets_that_began_within_the_window_count() -> None:
    misses = Misses(a_picker())
    for at in (0.0, 9.0, 10.0, 25.0):
        bucket = misses.bucket(now=at)
        bucket.by_policy["default"].update(requests=1, prompt_tokens=10, matched_tokens=4)
        bucket.miss(NEW, 6)
    assert misses.bucket(now=29.0) is bucket, "a bucket lasts for ten seconds"
    found = misses.over(20.0, now=30.0)
    assert found.total() == {"requests": 2, "prompt_tokens": 20, "matched_tokens": 8}
    assert found.missed[NEW] == {None: 12}
    assert misses.over(900.0, now=30.0).total()["requests"] == 4
    assert misses.over(900.0, now=30.0).began_at == 0.0


def test_buckets_older_than_fifteen_minutes_are_dropped() -> None:
    misses = Misses(a_picker())
    for n in range(200):
        misses.bucket(now=10.0 * n).by_policy["default"].update(requests=1)
    assert misses.over(1e9, now=2000.0).total()["requests"] == 90


def test_beyond_the_bound_tokens_count_without_their_server() -> None:
    misses = Misses(a_picker())
    bucket = misses.bucket(now=0.0)
    for n in range(2500):
        bucket.miss(EVICTED, 1, server=EndpointName(f"s{n}"))
    bucket.miss(EVICTED, 1, server=EndpointName("s0"))
    by_server = misses.over(60.0, now=1.0).missed[EVICTED]
    assert sum(by_server.values()) == 2501
    assert len(by_server) == 2000 + 1
    assert by_server[EndpointName("s0")] == 2


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


MOST = 32_768


def test_memory_is_bounded_and_the_sample_stays_the_same_for_every_chunk() -> None:
    seen, rng = Seen(), random.Random(1)
    chunks = [ChunkHash(rng.getrandbits(64)) for _ in range(20 * MOST)]
    for n in range(0, len(chunks), 1000):
        seen.note(chunks[n : n + 1000], SentPrompt(A, 0, n / 1000))
        if n % 50_000 == 0:
            check_seen(seen)
    assert seen.one_in == 32
    sampled = seen.sampled(chunks)
    assert len(sampled) == pytest.approx(len(chunks) / 32, rel=0.05)
    assert all(seen.get(chunk) is not None for chunk in sampled), "no prompt of the sample is forgotten"


def test_old_chunks_are_dropped_before_the_sample_is_made_smaller() -> None:
    seen = Seen()
    for n in range(0, 4 * MOST, 1024):
        seen.note([ChunkHash(n + k) for k in range(1024)], SentPrompt(A, 0, n / 4.0))
    check_seen(seen)
    assert seen.one_in == 1
    assert seen.get(ChunkHash(4 * MOST - 1)) is not None
    assert seen.get(ChunkHash(1)) is None


def test_a_chunk_is_remembered_at_the_last_server_that_got_it() -> None:
    seen = Seen()
    first, second = (SentPrompt(EndpointName(name), 0, at) for name, at in (("a", 1.0), ("b", 2.0)))
    seen.note([ChunkHash(1), ChunkHash(2)], first)
    seen.note([ChunkHash(2)], second)
    assert [seen.get(ChunkHash(n)) for n in (1, 2, 3)] == [first, second, None]
    assert seen.none_of([ChunkHash(3)])
    assert not seen.none_of([ChunkHash(3), ChunkHash(1)])


def test_a_chunk_that_is_sent_again_is_not_the_oldest_any_more() -> None:
    seen = Seen()
    seen.note([ChunkHash(n) for n in range(MOST)], SentPrompt(A, 0, 0.0))
    seen.note([ChunkHash(1)], SentPrompt(A, 0, 5000.0))
    seen.note([ChunkHash(MOST)], SentPrompt(A, 0, 5001.0))
    check_seen(seen)
    assert seen.get(ChunkHash(1)) is not None
    assert seen.get(ChunkHash(2)) is None
