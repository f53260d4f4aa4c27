"""From logits to tokens: greedy, or drawn at a temperature from the most likely ones.

A draw is one uniform number, made from the request's seed and the token's place in the answer, put through the
distribution's cumulative sum over tokens in order of likelihood. So a token depends on its logits and its request alone:
neither the batch around it nor a preemption changes an answer. Caller: the runner.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch
import xxhash

from model_server.core.request import Request, TokenId
from model_server.core.sampling import SamplingParams, TokenLogprobs


def choose(
    logits: torch.Tensor, requests: Sequence[Request]
) -> tuple[list[TokenId], list[TokenLogprobs | None]]:
    """The next token of each request, and what to tell about it. `logits`: (requests, vocabulary)."""
    tokens = [TokenId(token) for token in logits.argmax(-1).tolist()]
    for row, request in enumerate(requests):
        if request.sampling.temperature > 0:
            tokens[row] = draw(logits[row], request.sampling, position=request.num_output_tokens)
    told = [
        None
        if request.sampling.num_logprobs is None
        else logprobs(logits[row], tokens[row], count=request.sampling.num_logprobs)
        for row, request in enumerate(requests)
    ]
    return tokens, told


def draw(logits: torch.Tensor, params: SamplingParams, *, position: int) -> TokenId:
    """One token at a temperature over 0. `logits`: (vocabulary,); `position`: of the token in the answer."""
    scaled = logits.double() / params.temperature
    ordered, ids = scaled.sort(descending=True, stable=True)
    if params.top_k:
        ordered = ordered[: params.top_k]
    probabilities = ordered.softmax(-1)
    cumulative = probabilities.cumsum(-1)
    # A token stays in while those before it have not reached top_p, so the most likely one always does.
    kept = int((cumulative - probabilities < params.top_p).sum())
    target = uniform(params.seed, position) * float(cumulative[kept - 1])
    place = int(
        torch.searchsorted(
            cumulative[:kept],
            torch.tensor(target, dtype=cumulative.dtype, device=cumulative.device),
            right=True,
        )
    )
    return TokenId(int(ids[min(place, kept - 1)]))


def logprobs(logits: torch.Tensor, token_id: TokenId, *, count: int) -> TokenLogprobs:
    logs = logits.double().log_softmax(-1)
    top = logs.topk(count)
    pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    return TokenLogprobs(float(logs[token_id]), tuple(pairs))


def uniform(seed: int, position: int) -> float:
    """In [0, 1)."""
    word = xxhash.xxh3_64_intdigest(struct.pack("<I", position), seed=seed & 0xFFFFFFFFFFFFFFFF)
    return (word >> 11) / 2.0**53
