"""A real model, requests with made-up text, and one timed run of them.

Times are CPU seconds of the whole process, one torch thread: on a machine that others use too, the clock on the wall says
more of them than of us. Sides that are compared run in turns within each repeat.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from transformers.utils import logging as transformers_logging

from model_server.core.cache_options import CacheOptions
from model_server.core.engine import Engine, EngineConfig
from model_server.core.request import NO_TOKEN, Request, RequestId, TokenId
from model_server.core.scheduler import SchedulerLimits
from model_server.runners.hf import model as hf
from model_server.runners.hf.runner import HfRunner
from model_server.text.pretrained import PretrainedLanguage
from model_server.weights.known import SMOLLM2, find
from tests.vllm_env.prompts import prose

BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Bench:
    """SmolLM2, whole or its first layers, over one memory that each run starts with empty."""

    folder: Path
    language: PretrainedLanguage
    model: hf.PagedModel
    layers: int
    num_blocks: int


def prepare(*, layers: int = 0, num_blocks: int = 2048) -> Bench:
    """layers: of the model's 30, the first so many; 0: all."""
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()
    folder = find(SMOLLM2, progress=print)
    module = hf.load(folder, device=torch.device("cpu"), dtype=torch.float32)
    if layers:
        module.model.layers = module.model.layers[:layers]
        module.config.num_hidden_layers = layers
    model = hf.PagedModel(module, num_blocks=num_blocks, block_size_tokens=BLOCK_TOKENS)
    return Bench(folder, PretrainedLanguage(folder), model, layers or len(module.model.layers), num_blocks)


def text_of(bench: Bench, name: str, *, tokens: int) -> list[TokenId]:
    """Exactly so many tokens of text, the same for the same name."""
    return bench.language.encode(prose(name, words=tokens))[:tokens]


def request(name: str, prompt: Sequence[TokenId], *, max_tokens: int) -> Request:
    """Greedy, and never at its end before `max_tokens`."""
    return Request(RequestId(name), list(prompt), max_tokens=max_tokens, arrival_s=0.0, ignore_eos=True)


def config_of(
    bench: Bench, *, cache: bool, partial_blocks: bool = False, batch_tokens: int = 2048
) -> EngineConfig:
    return EngineConfig(
        num_blocks=bench.num_blocks,
        block_size_tokens=BLOCK_TOKENS,
        enable_prefix_caching=cache,
        eos_token_id=NO_TOKEN,
        cache=CacheOptions(partial_blocks=partial_blocks and cache),
        limits=SchedulerLimits(max_num_seqs=64, max_num_batched_tokens=batch_tokens),
    )


def engine_of(bench: Bench, *, cache: bool, partial_blocks: bool = False) -> Engine:
    return Engine(config_of(bench, cache=cache, partial_blocks=partial_blocks), HfRunner(bench.model))


def finish(engine: Engine, requests: Sequence[Request]) -> float:
    """All of them to their ends; CPU seconds."""
    started = time.process_time()
    for one in requests:
        engine.add(one)
    while engine.num_unfinished:
        engine.step(now=time.monotonic())
    return time.process_time() - started


def hit_share(requests: Sequence[Request]) -> float:
    """Cached prompt tokens over prompt tokens."""
    return sum(r.num_cached_tokens or 0 for r in requests) / sum(r.num_prompt_tokens for r in requests)


def in_turns(
    sides: Mapping[str, Callable[[int], float]], *, repeats: int, say: Callable[[str], None]
) -> dict[str, list[float]]:
    """Each side once in every repeat, in an order that turns around; the figures of each."""
    found: dict[str, list[float]] = {name: [] for name in sides}
    for repeat in range(repeats):
        for name in list(sides)[:: 1 if repeat % 2 else -1]:
            found[name].append(sides[name](repeat))
            say(f"repeat {repeat + 1} of {repeats}, {name}: {found[name][-1]:.3f}")
    return found


def ratio(found: dict[str, list[float]], over: str, under: str) -> float:
    """Median of the repeats' own ratios."""
    return median(a / b for a, b in zip(found[over], found[under], strict=True))
