"""What is counted: tokens a second, with Retry-After; tokens of each tenant; answers."""

from math import inf

from epp.config.flow import Flow, WaitingSettings
from epp.picker.flow.accounts import OTHERS_LABEL, AnswerLengths, add_for
from epp.picker.flow.control import FlowControl, Forecast
from epp.picker.flow.queues import OTHERS
from tests.unit.picker.flow.a_fleet import AFleet, Ask, gateway


def test_the_first_32_tenants_are_counted_by_name_and_all_others_together() -> None:
    shares: dict[str, int] = {}
    for tenant in (OTHERS, *(f"t{n}" for n in range(100)), "t0"):
        add_for(tenant, 10, shares)
    assert len(shares) == 33
    assert (shares["t0"], shares["t31"], shares[OTHERS_LABEL]) == (20, 10, 690)


def test_a_tenant_without_samples_counts_as_the_mean_of_all() -> None:
    lengths = AnswerLengths()
    assert lengths.expected("a", most=inf) == 200
    lengths.learn("a", 1000)
    assert lengths.expected("a", most=inf) == lengths.expected("b", most=inf) == 1000
    lengths.learn("b", 100)
    assert lengths.expected("b", most=inf) == 100
    assert lengths.expected("c", most=inf) == 550


def test_a_mean_follows_the_last_twenty_samples() -> None:
    lengths = AnswerLengths()
    for tokens in [10] * 1000 + [500] * 60:
        lengths.learn("a", tokens)
    assert 450 < lengths.expected("a", most=inf) <= 500


def test_of_many_tenants_the_last_1024_are_remembered() -> None:
    lengths = AnswerLengths()
    for n in range(3000):
        lengths.learn(str(n), n)
    assert lengths.expected("1976", most=inf) == 1976
    assert lengths.expected("1975", most=inf) > 2900, "it counts as the mean of all"


def test_a_short_prompt_with_a_long_answer_is_charged_for_both() -> None:
    flow: FlowControl[Ask] = FlowControl(Flow(), AFleet(1))
    flow.answers.learn("long", 4000)
    for tenant, most in (("long", inf), ("bounded", 5.0)):
        forecast = Forecast(0.0, 0.0, 10, most)
        flow.offer(
            Ask(10), forecast, priority=0, tenant=tenant, size_bytes=0, left_s=inf, longest_s=inf, now=0.0
        )
    assert flow.let_go_tokens == {"long": 10 + 2 * 4000, "bounded": 10 + 2 * 5}


def test_retry_after_is_the_time_in_which_the_queue_drains() -> None:
    gate = gateway(Flow(in_all=WaitingSettings(max_requests=10)))
    for n in range(30):  # a thousand tokens a second
        gate.offer(Ask(500), now=0.5 * n)
        gate.run(now=0.5 * n, until=0.5 * n)
    for _ in range(13):
        gate.offer(Ask(500), now=15.0)
    waited_s = 10 * 500 / 1000
    assert waited_s <= gate.refused[-1][1].retry_after_s <= waited_s + 1


def test_retry_after_counts_the_only_request_that_went() -> None:
    gate = gateway(Flow(in_all=WaitingSettings(max_requests=0)))
    gate.offer(Ask(2000), now=0.1)
    gate.offer(Ask(6000), now=1.1)
    assert gate.refused[-1][1].retry_after_s == 3
