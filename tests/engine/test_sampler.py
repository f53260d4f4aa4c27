"""Sampling: each token comes as often as its probability says, and only tokens that are allowed."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from model_server.core.sampling import SamplingParams
from model_server.runners.hf.sampler import draw

DRAWS = 3000


def made_up(vocabulary: int, *, spread: float) -> torch.Tensor:
    return spread * torch.randn(vocabulary, generator=torch.Generator().manual_seed(1))


def allowed(logits: torch.Tensor, params: SamplingParams) -> dict[int, float]:
    """Return the allowed tokens with their probabilities, one by one as the parameters say."""
    probabilities = (logits.double() / params.temperature).softmax(-1).tolist()
    likely = sorted(enumerate(probabilities), key=lambda pair: -pair[1])[: params.top_k or None]
    whole, before, kept = sum(p for _, p in likely), 0.0, dict[int, float]()
    for token, probability in likely:
        if before < params.top_p * whole:
            kept[token] = probability
        before += probability
    rest = sum(kept.values())
    return {token: probability / rest for token, probability in kept.items()}


@pytest.mark.parametrize("top_p", [1.0, 0.8])
@pytest.mark.parametrize("top_k", [0, 5])
def test_tokens_are_drawn_as_often_as_their_probabilities_say(top_k: int, top_p: float) -> None:
    logits = made_up(12, spread=1.0)
    params = SamplingParams(temperature=0.7, top_k=top_k, top_p=top_p, seed=3)
    expected = allowed(logits, params)
    drawn = Counter(int(draw(logits, params, position=n)) for n in range(DRAWS))
    assert drawn.keys() <= expected.keys()
    for token, probability in expected.items():
        assert drawn[token] / DRAWS == pytest.approx(probability, abs=0.03)


@pytest.mark.parametrize("spread", [0.01, 6.0], ids=["more tokens than are looked at first", "fewer"])
def test_of_a_large_vocabulary_the_tokens_that_make_up_top_p_are_drawn(spread: float) -> None:
    logits = made_up(4000, spread=spread)
    params = SamplingParams(temperature=1.0, top_p=0.9, seed=4)
    expected = allowed(logits, params)
    assert (len(expected) > 1024) == (spread < 1)
    drawn = {draw(logits, params, position=n) for n in range(300)}
    assert drawn <= expected.keys()
    assert len(drawn) > 250 if spread < 1 else len(drawn) > 5


def test_a_draw_depends_on_seed_and_position_alone() -> None:
    logits = made_up(1000, spread=0.5)
    first, again, other = (
        [draw(logits, SamplingParams(temperature=1.0, seed=seed), position=n) for n in range(40)]
        for seed in (1, 1, 2)
    )
    assert first == again != other
