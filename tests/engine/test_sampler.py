"""Sampling: each token comes as often as its probability says, and only tokens that are allowed."""

from collections import Counter

import pytest
import torch

from model_server.core.request import Request, RequestId, TokenId
from model_server.core.sampling import SamplingParams
from model_server.runners.hf.sampler import adjust, draw

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


def test_min_p_cuts_by_a_share_of_the_most_likely_tokens_probability() -> None:
    logits = made_up(12, spread=1.0)
    probabilities = (logits.double() / 1.5).softmax(-1)
    kept = set((probabilities >= 0.4 * probabilities.max()).nonzero().flatten().tolist())
    params = SamplingParams(temperature=1.5, min_p=0.4, seed=3)
    assert {draw(logits, params, position=n) for n in range(DRAWS)} == kept
    assert 1 < len(kept) < 12


def test_bias_and_penalties_count_prompt_and_answer_as_vllm_does() -> None:
    logits = torch.tensor([2.0, -2.0, 1.0, 1.0, 0.5, 3.0])
    params = SamplingParams(
        presence_penalty=0.5,
        frequency_penalty=0.25,
        repetition_penalty=2.0,
        logit_bias=((4, 1.5),),
        min_tokens=4,
        end_token_ids=frozenset({5}),
    )
    request = Request(RequestId("a"), [TokenId(0)], max_tokens=9, arrival_s=0, sampling=params)
    request.token_ids += [TokenId(1), TokenId(1), TokenId(2)]
    expected = [2 / 2, -2 * 2 - 0.5 - 2 * 0.25, 1 / 2 - 0.5 - 0.25, 1.0, 0.5 + 1.5, -torch.inf]
    assert adjust(logits, request).tolist() == expected
    assert logits[0] == 2.0, "the model's own logits stay"
    request.token_ids.append(TokenId(3))
    assert adjust(logits, request)[5] == 3.0
