"""What the picker gives to exact mode, within its bounds."""

import random

from epp.base.types import Address, ApiKind, Endpoint, EndpointName, InferenceRequest
from epp.config.policy import DEFAULT_POLICY
from epp.picker.decision import Question
from epp.picker.events import Restarted
from epp.picker.picker import Picker
from epp.sources.kvevents.routed_prompts import RoutedPrompts

A, B = (Endpoint(EndpointName(n), Address(f"10.0.0.{i}", 8000)) for i, n in enumerate("ab", start=1))


def picker_heard_by(queue: RoutedPrompts) -> Picker:
    picker = Picker(DEFAULT_POLICY, rng=random.Random(0))
    picker.subscribe(queue.on_event)
    picker.news.set_endpoints([A, B], now=0.0)
    return picker


def request_of_size(name: str, *, only: Endpoint | None = None, size: int = 4000) -> Question:
    prompt = random.Random(name).randbytes(size // 2).hex().encode()
    return Question(
        name,
        InferenceRequest(kind=ApiKind.CHAT, model="m", prompt=prompt),
        body_bytes=size,
        subset=frozenset({only.address}) if only else None,
    )


def a_queue(*, max_prompts: int = 10, max_bytes: int = 10**6) -> RoutedPrompts:
    return RoutedPrompts(max_prompts=max_prompts, max_bytes=max_bytes)


def test_a_prompt_is_handed_over_with_its_server_when_the_answer_begins() -> None:
    queue = a_queue()
    picker = picker_heard_by(queue)
    pick = picker.pick(request_of_size("x", only=A), now=1.0)
    assert queue.take() is None
    picker.on_response_headers(pick, status=200, served=B.address, now=2.0)
    routed = queue.take()
    assert routed is not None
    assert (routed.server, routed.inference) == (B.name, request_of_size("x").inference)
    assert queue.take() is None
    picker.end(pick, outcome="ended", now=3.0)
    assert queue.held_bytes == 0


def test_prompts_that_no_server_answered_are_dropped() -> None:
    queue = a_queue()
    picker = picker_heard_by(queue)
    failed, refused, detached = (picker.pick(request_of_size(n), now=1.0) for n in "xyz")
    assert queue.held_bytes == 12000
    picker.end(failed, outcome="failed", now=2.0)
    picker.on_response_headers(refused, status=500, served=refused.destinations[0], now=2.0)
    picker.end(refused, outcome="ended", now=2.0)
    picker.detach(detached, now=2.0)
    assert (queue.take(), queue.held_bytes) == (None, 0)


def test_prompts_over_a_bound_are_dropped_and_counted() -> None:
    queue = a_queue(max_prompts=2, max_bytes=15000)
    picker = picker_heard_by(queue)
    picks = [picker.pick(request_of_size(n), now=1.0) for n in "vwxyz"]  # room for three
    assert (queue.dropped, queue.held_bytes) == (2, 12000)
    for pick in picks:
        picker.on_response_headers(pick, status=200, served=pick.destinations[0], now=2.0)
    assert (queue.dropped, queue.held_bytes) == (3, 8000)


def test_a_restart_that_the_picker_notices_is_handed_over() -> None:
    queue = a_queue()
    picker = picker_heard_by(queue)
    queue.on_event(Restarted(at=1.0, server=next(iter(picker.fleet.states()))))
    assert [*queue.restarted] == [A.name]
