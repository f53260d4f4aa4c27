"""What the picker learns about the tokens of a model's prompts."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.base.types import EndpointMetrics, Media, PromptSize
from epp.picker.endpoints.learned import CounterWindow, TokenEstimate
from epp.picker.server_caches import estimated_tokens


def test_estimate_starts_from_the_policy_and_follows_the_reported_counts() -> None:
    estimate = TokenEstimate(start=4.0)
    assert estimated_tokens(PromptSize(4000), estimate.terms) == 1000
    for _ in range(50):
        estimate.learn(PromptSize(2000), 1000)
    assert estimated_tokens(PromptSize(4000), estimate.terms) == pytest.approx(2000, rel=0.02)
    assert estimate.bytes_per_token == pytest.approx(2.0, rel=0.02)


def test_a_change_of_language_shows_within_600_requests() -> None:
    estimate = TokenEstimate(start=4.0)
    for _ in range(5000):
        estimate.learn(PromptSize(4000), 1000)
    for _ in range(600):
        estimate.learn(PromptSize(1500), 1000)
    assert estimated_tokens(PromptSize(1500), estimate.terms) == pytest.approx(1000, rel=0.1)


ENGLISH, CODE = 0.24, 0.31
"""The tokens of a byte; then those of a letter of Chinese, a picture, a second of sound, one of a film."""
CHINESE, PICTURE, SOUND, FILM = 0.9, 1100, 12, 600


def sized_prompt(kind: str, rng: random.Random) -> tuple[PromptSize, float]:
    """Return one prompt of this kind, and the number of tokens that a tokenizer would make of it. The number
    varies by a twentieth.
    """
    size, noise = rng.randrange(300, 20_000), rng.uniform(0.95, 1.05)
    if kind == "chinese":
        return PromptSize(3 * size, 2.0 * size), CHINESE * size * noise
    if kind == "pictures":
        count = rng.randrange(1, 4)
        return PromptSize(size, 0.0, Media(720 * count)), (ENGLISH * size + PICTURE * count) * noise
    if kind in ("sound", "films"):
        seconds = rng.randrange(1, 60)
        guessed = Media(sound=25 * seconds) if kind == "sound" else Media(films=256 * seconds)
        real = SOUND if kind == "sound" else FILM
        return PromptSize(size, 0.0, guessed), (ENGLISH * size + real * seconds) * noise
    return PromptSize(size), (CODE if kind == "code" else ENGLISH) * size * noise


def worst_error(estimate: TokenEstimate, kind: str, rng: random.Random) -> float:
    """Return the mean error over prompts of the kind, as a share."""
    asked = [sized_prompt(kind, rng) for _ in range(200)]
    errors = [abs(estimated_tokens(size, estimate.terms) / tokens - 1) for size, tokens in asked]
    return sum(errors) / len(errors)


@pytest.mark.parametrize(
    "kinds",
    [
        ["english"],
        ["code"],
        ["chinese"],
        ["pictures"],
        ["english", "chinese", "pictures"],
        ["english", "pictures", "sound", "films"],
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_traffic_is_estimated_within_a_tenth_after_a_hundred_requests(kinds: list[str], seed: int) -> None:
    estimate, rng = TokenEstimate(start=4.0), random.Random(seed)
    for _ in range(100):
        estimate.learn(*sized_prompt(rng.choice(kinds), rng))
    for kind in kinds:
        assert worst_error(estimate, kind, rng) < 0.1


@given(
    st.lists(
        st.tuples(st.integers(-10, 10**6), st.floats(0, 1), st.integers(0, 50), st.floats(-10, 1e6)),
        max_size=50,
    )
)
def test_an_estimate_is_never_negative_or_absurdly_low(pairs: list[tuple[int, float, int, float]]) -> None:
    estimate = TokenEstimate(start=4.0)
    for size, share, opaque, tokens in pairs:
        size_of = PromptSize(size, share * size, Media(opaque))
        estimate.learn(size_of, tokens)
        assert estimated_tokens(PromptSize(640, share * 640, Media(opaque)), estimate.terms) >= 10
        assert 0 < estimate.bytes_per_token < float("inf")


@pytest.mark.parametrize("tokens", [1e15, 1e6, 100.0])
def test_token_counts_that_no_tokenizer_could_produce_teach_nothing(tokens: float) -> None:
    estimate = TokenEstimate(start=4.0)
    estimate.learn(PromptSize(100_000), tokens)
    assert estimate.bytes_per_token == 4.0
    assert estimated_tokens(PromptSize(4000), estimate.terms) == 1000


def page(*, finished: float, prompt_tokens: float, running: int = 0) -> EndpointMetrics:
    return EndpointMetrics(
        scraped_at=0.0, finished=finished, prompt_tokens=prompt_tokens, running=running, waiting=0
    )


def window_of(requests: int, start: EndpointMetrics) -> CounterWindow:
    window = CounterWindow()
    assert window.sample(start) is None
    for number in reversed(range(requests)):
        window.add(PromptSize(400, 3.0, Media(number, films=2 * number)))
    return window


@pytest.mark.parametrize(
    ("requests", "finished", "running", "tokens"),
    [
        (20, 27, 0, 2000.0),
        (80, 91, 2, 2000.0),
        (19, 26, 0, None),
        (20, 27, 3, None),
        (20, 37, 0, None),
    ],
    ids=["idle", "busy, with few in flight at its edges", "short", "too many in flight", "others' requests"],
)
def test_counters_teach_where_nearly_all_requests_were_ours(
    requests: int, finished: float, running: int, tokens: float | None
) -> None:
    window = window_of(requests, page(finished=7, prompt_tokens=100, running=running))
    found = window.sample(page(finished=finished, prompt_tokens=2100, running=running))
    numbers = sum(range(requests))
    size = PromptSize(400 * requests, 3.0 * requests, Media(numbers, films=2 * numbers))
    assert found == (None if tokens is None else (size, tokens))


def test_a_server_that_does_not_count_finished_requests_gives_no_sample() -> None:
    window = window_of(100, EndpointMetrics(scraped_at=0.0, prompt_tokens=0.0, running=0, waiting=0))
    assert window.sample(EndpointMetrics(scraped_at=1.0, prompt_tokens=9.0, running=0, waiting=0)) is None
