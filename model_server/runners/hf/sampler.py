"""Chooses tokens from logits: the most likely token, or a token drawn at a temperature from the most likely
tokens. A draw makes one uniform number from the request's seed and the token's place in the answer. It looks
this number up in the cumulative sum of the tokens' probabilities. If only the most likely tokens are allowed,
the sum is in order of likelihood, otherwise in the vocabulary's order. So a token depends only on its logits
and its request: neither the rest of the batch nor a preemption changes an answer. Caller: the runner.
"""

import struct
from collections.abc import Sequence

import torch
import xxhash

from model_server.core.request import Request, TokenId
from model_server.core.sampling import SamplingParams, TokenLogprobs

_FIRST_LOOK = 1024
"""For top_p this many tokens are examined first. Sorting the whole vocabulary takes ten times as long."""


def choose(
    logits: torch.Tensor, requests: Sequence[Request]
) -> tuple[list[TokenId], list[TokenLogprobs | None]]:
    """Return the next token of each request, with the log probabilities that it asked for. `logits` has the
    shape (requests, vocabulary).
    """
    adjusted = [
        constrained(adjust(own, request), request) for own, request in zip(logits, requests, strict=True)
    ]
    tokens = [TokenId(most) for most in torch.stack(adjusted).argmax(-1).tolist()]  # waits for a GPU once
    for row, request in enumerate(requests):
        if request.sampling.temperature > 0:
            tokens[row] = draw(adjusted[row], request.sampling, position=request.num_output_tokens)
    wanted_logprobs = [
        None
        if request.sampling.num_logprobs is None
        else logprobs(logits[row], tokens[row], count=request.sampling.num_logprobs)
        for row, request in enumerate(requests)
    ]
    return tokens, wanted_logprobs


def adjust(logits: torch.Tensor, request: Request) -> torch.Tensor:
    """Return the logits after bias and penalties, in vLLM's order. The argument is not changed."""
    params = request.sampling
    early = params.end_token_ids if request.num_output_tokens < params.min_tokens else ()
    if not (
        early
        or params.logit_bias
        or params.presence_penalty
        or params.frequency_penalty
        or params.repetition_penalty != 1
    ):
        return logits
    logits = logits.float().clone()
    logits[list(early)] = -torch.inf
    for token, bias in params.logit_bias:
        logits[token] += bias
    seen = torch.tensor(request.token_ids, device=logits.device).unique()
    own = logits[seen]
    penalty = params.repetition_penalty
    logits[seen] = torch.where(own > 0, own / penalty, own * penalty)
    output = torch.tensor(
        request.token_ids[request.num_prompt_tokens :], dtype=torch.long, device=logits.device
    )
    answered, counts = output.unique(return_counts=True)
    logits[answered] -= params.frequency_penalty * counts + params.presence_penalty
    return logits


def constrained(logits: torch.Tensor, request: Request) -> torch.Tensor:
    """Return the logits without the tokens that the request's constraint forbids."""
    if request.constraint is None:
        return logits
    allowed = torch.as_tensor(request.constraint(request.token_ids[request.num_prompt_tokens :]))
    allowed = allowed[allowed < len(logits)].to(logits.device)
    kept = torch.full_like(logits, -torch.inf)
    kept[allowed] = logits[allowed]
    return kept


def draw(logits: torch.Tensor, params: SamplingParams, *, position: int) -> TokenId:
    """Draw one token at a temperature above 0. `logits` has the shape (vocabulary,). `position` is the
    token's place in the answer.
    """
    probabilities = (logits.double() / params.temperature).softmax(-1)
    if params.min_p:
        probabilities = probabilities.where(probabilities >= params.min_p * probabilities.max(), 0.0)
        probabilities /= probabilities.sum()
    number = uniform(params.seed, position)
    if not params.top_k and params.top_p == 1:
        return TokenId(_place(probabilities, number))
    likely, ids = _most_likely(probabilities, params)
    return TokenId(int(ids[_place(likely, number)]))


def _most_likely(probabilities: torch.Tensor, params: SamplingParams) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the allowed tokens and their probabilities, the most likely first."""
    likely, ids = probabilities.topk(min(params.top_k or _FIRST_LOOK, len(probabilities)))
    if not params.top_k and float(likely.sum()) < params.top_p:
        likely, ids = probabilities.sort(descending=True, stable=True)
    # A token stays if the tokens before it have not reached top_p. So the most likely token always stays.
    whole = likely.sum() if params.top_k else 1.0
    kept = int((likely.cumsum(-1) - likely < params.top_p * whole).sum())
    return likely[:kept], ids[:kept]


def _place(weights: torch.Tensor, number: float) -> int:
    """Return the index of the weight that the number falls on. The number is a share of the weights' sum, in
    [0, 1).
    """
    cumulative = weights.cumsum(-1)
    found = torch.searchsorted(cumulative, number * cumulative[-1], right=True)
    return min(int(found), len(weights) - 1)


def logprobs(logits: torch.Tensor, token_id: TokenId, *, count: int) -> TokenLogprobs:
    logs = logits.double().log_softmax(-1)
    top = logs.topk(count)
    pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    return TokenLogprobs(float(logs[token_id]), tuple(pairs))


def uniform(seed: int, position: int) -> float:
    """Return a number in [0, 1)."""
    word = xxhash.xxh3_64_intdigest(struct.pack("<I", position), seed=seed & 0xFFFFFFFFFFFFFFFF)
    return (word >> 11) / 2.0**53
