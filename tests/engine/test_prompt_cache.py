"""A real model's runner keeps whole prompts: no forward pass, and the same draws."""

import copy

import pytest
import torch

from model_server.core.engine import Engine, EngineConfig, TokenOutput
from model_server.core.request import NO_TOKEN, Request, RequestId, TokenId
from model_server.core.sampling import SamplingParams
from model_server.runners.hf.model import PagedModel
from model_server.runners.hf.runner import HfRunner
from tests.engine.harness import plain_logits, tokens
from tests.engine.tiny_models import VOCABULARY, tiny


def paged_engine(*, entries: int) -> Engine:
    model = PagedModel(copy.deepcopy(tiny("llama")), num_blocks=40, block_size_tokens=8)
    config = EngineConfig(
        num_blocks=40, block_size_tokens=8, eos_token_id=NO_TOKEN, prompt_cache_entries=entries
    )
    return Engine(config, HfRunner(model))


def seeded_request(name: str, prompt: list[int], *, temperature: float, seed: int) -> Request:
    sampling = SamplingParams(temperature=temperature, seed=seed, num_logprobs=2)
    return Request(
        RequestId(name), [TokenId(t) for t in prompt], max_tokens=6, arrival_s=0.0, sampling=sampling
    )


def run_noting_steps(engine: Engine, *requests: Request) -> list[int]:
    """Return how many tokens each step computed."""
    computed = []
    for request in requests:
        engine.add(request)
    while engine.num_unfinished:
        plan = engine.begin(now=0.0)
        computed.append(sum(chunk.num_tokens for chunk in plan.chunks))
        engine.finish(plan, engine.runner.execute(plan), now=0.0)
        engine.check_integrity()
    return computed


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_003_1_a_kept_prompt_is_answered_as_one_that_is_computed(temperature: float) -> None:
    prompt, other = tokens(21, seed=1), tokens(9, seed=2)
    kept, fresh = paged_engine(entries=4), paged_engine(entries=0)
    assert run_noting_steps(kept, seeded_request("first", prompt, temperature=temperature, seed=1))[0] == 21
    again = seeded_request("again", prompt, temperature=temperature, seed=2)
    beside = seeded_request("beside", other, temperature=temperature, seed=3)
    assert run_noting_steps(kept, again, beside)[0] == len(other), "no token of the kept prompt is computed"
    for request, asked, seed in ((again, prompt, 2), (beside, other, 3)):
        alone = seeded_request("alone", asked, temperature=temperature, seed=seed)
        run_noting_steps(fresh, alone)
        assert request.token_ids == alone.token_ids
    if not temperature:
        expected = plain_logits(tiny("llama"), again.token_ids)
        for end in range(len(prompt), len(again.token_ids)):
            assert again.token_ids[end] == int(expected[end - 1].argmax())


def test_003_3_after_the_copy_of_a_kept_tail_every_logit_is_plain_models() -> None:
    """Two requests write into copies of one kept block of 5 tokens at the same time. They go on with
    different tokens.
    """
    prompt = tokens(21, seed=1)
    engine = paged_engine(entries=4)
    run_noting_steps(engine, seeded_request("first", prompt, temperature=0.0, seed=1))
    requests = [seeded_request(f"again {seed}", prompt, temperature=1.5, seed=seed) for seed in (2, 3)]
    for request in requests:
        engine.add(request)
    outputs: dict[str, list[TokenOutput]] = {}
    num_copies = 0
    while engine.num_unfinished:
        plan = engine.begin(now=0.0)
        num_copies += len(plan.copies)
        for output in engine.finish(plan, engine.runner.execute(plan), now=0.0):
            outputs.setdefault(output.request.request_id, []).append(output)
    assert num_copies == 2, "one block for each of them"
    assert requests[0].token_ids != requests[1].token_ids
    for request in requests:
        expected = plain_logits(tiny("llama"), request.token_ids).log_softmax(-1)
        for end, output in enumerate(outputs[request.request_id], start=len(prompt)):
            assert output.logprobs is not None
            right = expected[end - 1]
            assert output.logprobs.logprob == pytest.approx(float(right[output.token_id]), abs=1e-4)
            for token, logprob in output.logprobs.top:
                assert logprob == pytest.approx(float(right[token]), abs=1e-4)


def test_only_one_row_of_a_steps_logits_is_kept() -> None:
    engine = paged_engine(entries=8)
    asked = [seeded_request(str(n), tokens(10 + n, seed=n), temperature=0.0, seed=0) for n in range(5)]
    run_noting_steps(engine, *asked)
    assert engine.prompt_cache is not None
    again = seeded_request("again", tokens(10, seed=0), temperature=0.0, seed=0)
    entry = engine.prompt_cache.attach(again)
    assert entry is not None
    assert isinstance(entry.last_logits, torch.Tensor)
    assert entry.last_logits.untyped_storage().nbytes() == 4 * VOCABULARY
