"""The paged model is compared with the same transformers model, which computes each sequence at once."""

import contextlib
import copy
import itertools
import platform
import resource
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from model_server.core.request import RequestId
from model_server.runners.hf import packed
from model_server.runners.hf.captured import CapturedSteps
from model_server.runners.hf.errors import UnsupportedModelError
from model_server.runners.hf.memory import KvMemory
from model_server.runners.hf.model import PagedModel, keep_freed_memory
from model_server.runners.hf.views import Context, LongChunk, attention_weights
from tests.engine.harness import check_against_plain, engine_around, named_request, tokens
from tests.engine.tiny_models import FAMILIES, tiny
from tests.harness.engine_requests import run_to_end


@pytest.fixture(params=["on a CPU", "as on a GPU"])
def _device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's steps are packed, and captured if each request computes one token. A CPU has neither
    FlashAttention nor graphs, so these two are played; what they are given is the engine's.
    """
    if request.param == "on a CPU":
        return
    capture = CapturedSteps._capture  # noqa: SLF001

    def captured(steps: CapturedSteps, *size: int) -> Any:
        batch, pack, _, logits = capture(steps, *size)
        compute = steps._compute  # noqa: SLF001
        return batch, pack, SimpleNamespace(replay=lambda: logits.copy_(compute(batch))), logits

    monkeypatch.setattr(CapturedSteps, "_capture", captured)
    monkeypatch.setattr(packed, "possible", lambda memory: True)
    monkeypatch.setattr(packed, "flash_attention", _flash_attention)
    for name in ("graph_pool_handle", "CUDAGraph"):
        monkeypatch.setattr(torch.cuda, name, object)
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: contextlib.nullcontext())


def _flash_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    row_ends: torch.Tensor,
    slot_ends: torch.Tensor,
    *_: object,
    scale: float,
) -> list[torch.Tensor]:
    """What FlashAttention's own documentation says: the last query of a request sees all of its keys."""
    out = torch.full_like(query, torch.nan)
    for rows, slots in zip(
        itertools.pairwise(row_ends.tolist()), itertools.pairwise(slot_ends.tolist()), strict=True
    ):
        count, end = rows[1] - rows[0], slots[1] - slots[0]
        if end:
            visible = torch.ones(count, end, dtype=torch.bool).tril(end - count)
            own_keys, own_values = keys[slice(*slots)], values[slice(*slots)]
            weights = attention_weights(query[slice(*rows)], own_keys, scaling=scale, visible=visible)
            repeated = own_values.repeat_interleave(query.shape[1] // values.shape[1], dim=1)
            out[slice(*rows)] = torch.einsum("hqk,khd->qhd", weights, repeated)
    return [out]


@pytest.mark.usefixtures("_device")
@pytest.mark.parametrize("family", FAMILIES)
def test_requests_in_one_batch_get_the_logits_of_the_plain_model(family: str) -> None:
    module = tiny(family)
    plain = copy.deepcopy(module)
    engine, runner = engine_around(module, budget=40)
    shared = tokens(32, seed=1)
    prompts = [
        tokens(70, seed=2),
        tokens(3, seed=3),
        shared + tokens(9, seed=4),
        shared + tokens(20, seed=5),
        [7],
    ]
    requests = [named_request(str(index), prompt) for index, prompt in enumerate(prompts)]
    run_to_end(engine, *requests)
    mixed = [p for p in runner.steps if len({c.num_tokens == 1 for c in p.chunks}) == 2]
    assert mixed, "no step had both a prompt's chunk and single tokens"
    assert any(c.start and c.num_tokens > 1 for p in runner.steps for c in p.chunks), (
        "no prompt came in chunks"
    )
    assert requests[3].num_cached_tokens == 32
    check_against_plain(runner, plain, requests)


def test_long_and_short_contexts_in_one_step_get_the_logits_of_plain_model() -> None:
    """Long contexts are attended one at a time and short ones together, all in the same memory."""
    module = tiny("llama")
    plain = copy.deepcopy(module)
    engine, runner = engine_around(module, num_blocks=128, budget=1000)
    requests = [
        named_request(str(n), tokens(size, seed=n), max_tokens=8)
        for n, size in enumerate((300, 9, 252, 261, 5))
    ]
    run_to_end(engine, *requests)
    assert any(len(plan.chunks) == 5 and all(c.num_tokens == 1 for c in plan.chunks) for plan in runner.steps)
    check_against_plain(runner, plain, requests)


def test_a_read_into_scratch_memory_is_the_blocks_content() -> None:
    memory = PagedModel(tiny("llama"), num_blocks=8, block_size_tokens=4).memory
    memory.data.normal_(generator=torch.Generator().manual_seed(1))
    scratch = memory.scratch(4)
    for blocks in (torch.tensor([5, 2]), torch.tensor([[7, 0], [1, 3]])):
        for read, plain in zip(memory.read(1, blocks, into=scratch), memory.read(1, blocks), strict=True):
            assert torch.equal(read, plain)
            assert read.untyped_storage().data_ptr() == scratch.untyped_storage().data_ptr()


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_partial_blocks_are_copied_in_every_layer_before_they_are_written(family: str) -> None:
    module = tiny(family)
    plain = copy.deepcopy(module)
    engine, runner = engine_around(module, partial_blocks=True)
    shared = tokens(13, seed=1)
    first = named_request("first", shared + tokens(4, seed=2))
    run_to_end(engine, first)
    others = [named_request(str(seed), shared + tokens(6, seed=seed)) for seed in (3, 4)]
    run_to_end(engine, *others)
    assert [request.num_cached_tokens for request in others] == [13, 13]
    assert sum(len(plan.copies) for plan in runner.steps) >= 1
    check_against_plain(runner, plain, [first, *others])


@pytest.mark.usefixtures("_device")
def test_a_preempted_request_goes_on_with_the_same_logits() -> None:
    module = tiny("llama")
    plain = copy.deepcopy(module)
    engine, runner = engine_around(module, num_blocks=8)
    requests = [named_request(str(seed), tokens(22, seed=seed), max_tokens=20) for seed in (1, 2)]
    run_to_end(engine, *requests)
    assert sum(request.num_preemptions for request in requests) >= 1
    check_against_plain(runner, plain, requests)


def test_a_prompt_with_another_salt_is_computed_again_with_the_same_tokens() -> None:
    module = tiny("llama")
    engine, _ = engine_around(module)
    prompt = tokens(40, seed=1)
    requests = [
        named_request("one", prompt, salt="a"),
        named_request("two", prompt, salt="b"),
        named_request("three", prompt, salt="a"),
    ]
    for request in requests:
        run_to_end(engine, request)
    assert [request.num_cached_tokens for request in requests] == [0, 0, 32]
    assert requests[0].token_ids == requests[1].token_ids == requests[2].token_ids


class Window:
    """Lets a request see its first token and the last few. A selective store uses the same hook."""

    def __init__(self, width: int) -> None:
        self._width = width
        self.weights: list[torch.Tensor] = []

    def read(
        self, layer: int, chunk: LongChunk, query: torch.Tensor, *, memory: KvMemory, scaling: float
    ) -> Context:
        keys, values = (read.flatten(0, 1)[: chunk.end] for read in memory.read(layer, chunk.blocks))
        visible = window(chunk.start, chunk.end, self._width)
        kept = visible.any(0)
        self.weights.append(attention_weights(query, keys[kept], scaling=scaling, visible=visible[:, kept]))
        return Context(keys[kept], values[kept], visible[:, kept])


def window(start: int, end: int, width: int) -> torch.Tensor:
    """Return a mask of shape (queries, tokens)."""
    queries, positions = torch.arange(start, end)[:, None], torch.arange(end)[None, :]
    return (positions <= queries) & ((positions > queries - width) | (positions == 0))


def test_a_view_decides_in_each_layer_what_a_request_reads() -> None:
    module = tiny("llama")
    plain = copy.deepcopy(module)
    views = {RequestId("windowed"): Window(5)}
    engine, runner = engine_around(module, budget=16)
    runner.model.view_for = lambda request: views.get(request.request_id)
    requests = [named_request(name, tokens(30, seed=1), salt=name) for name in ("windowed", "whole")]
    run_to_end(engine, *requests)
    sequence = requests[0].token_ids
    bias = torch.zeros(1, 1, len(sequence), len(sequence)).masked_fill(
        ~window(0, len(sequence), 5), float("-inf")
    )
    with torch.inference_mode():
        expected = plain(input_ids=torch.tensor([sequence]), attention_mask=bias).logits[0]
    for end in range(30, len(sequence)):
        torch.testing.assert_close(
            runner.logits[RequestId("windowed"), end], expected[end - 1], rtol=1e-4, atol=1e-4
        )
    check_against_plain(runner, plain, requests[1:])
    for weights in views[RequestId("windowed")].weights:
        torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]))


def test_attention_that_is_more_than_causal_is_refused() -> None:
    config = FAMILIES["qwen2"]()
    config.use_sliding_window = True
    config.sliding_window = 4
    config.layer_types = ["sliding_attention"] * config.num_hidden_layers
    engine, _ = engine_around(AutoModelForCausalLM.from_config(config))
    engine.add(named_request("one", tokens(10, seed=1)))
    with pytest.raises(UnsupportedModelError, match="sliding_window"):
        engine.step(now=0.0)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_large_temporary_tensors_use_the_memory_of_those_before_them() -> None:
    """Otherwise the system hands out the pages again each time, 245,000 of them here."""
    assert keep_freed_memory()

    def step() -> None:
        held = [torch.empty(2 << 20).fill_(1) for _ in range(12)]  # 8 MiB each
        del held

    step()  # the first tensor makes the heap grow
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        step()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 60_000
