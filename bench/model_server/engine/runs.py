"""Prepares a model and requests with made-up text, and times a run of these requests. On a CPU, times are CPU
seconds of the whole process, with one torch thread. On a machine with other work, wall time would show the
other work more than ours. On a GPU, times are wall time until the device has finished its work. Sides that
are compared run in turns within each repeat.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from bench.model_server.engine.shapes import SHAPES
from model_server.core.cache_options import CacheOptions
from model_server.core.engine import Engine, EngineConfig
from model_server.core.request import NO_TOKEN, Request, RequestId, TokenId
from model_server.core.scheduler import SchedulerLimits
from model_server.runners.hf import model as hf
from model_server.runners.hf.runner import HfRunner
from model_server.text.pretrained import PretrainedLanguage
from model_server.weights.known import SMOLLM2, find
from tests.vllm_env.prompts import prose

Say = Callable[[str], None]
Figures = dict[str, Any]

BLOCK_TOKENS = 16
MODES = ("naive", "offline", "online")
"""The modes of 003-5."""


@dataclass(frozen=True, slots=True)
class Bench:
    """A model over one memory, which is empty at the start of each run."""

    model: hf.PagedModel
    name: str
    num_blocks: int
    text_of: Callable[[str, int], list[TokenId]]
    """Returns text of exactly this many tokens. The same name always gives the same text."""
    whole: bool
    """True if the machine is fast enough for the documents' own numbers of prompts."""
    requests: int | None = None
    """The number of prompts in 001-6 and of requests in 001-7 and 003-5, instead of the row's own number."""
    modes: Sequence[str] = MODES

    def twin(self) -> Bench:
        """Return the same weights over another memory, for two engines that run in turns within a run."""
        memory = self.model.memory
        own = hf.PagedModel(
            self.model.module, num_blocks=self.num_blocks, block_size_tokens=memory.block_size_tokens
        )
        return replace(self, model=own)

    def now_s(self) -> float:
        if self.model.memory.device.type == "cpu":
            return time.process_time()
        torch.cuda.synchronize()
        return time.perf_counter()


def prepare(*, layers: int = 0, num_blocks: int = 2048) -> Bench:
    """Return a bench of SmolLM2 on one CPU thread. `layers` is the number of its 30 layers that are used, and
    0 means all.
    """
    torch.set_num_threads(1)
    folder = find(SMOLLM2, progress=print)
    module = hf.load(folder, device=torch.device("cpu"), dtype=torch.float32)
    if layers:
        module.model.layers = module.model.layers[:layers]
        module.config.num_hidden_layers = layers
    model = hf.PagedModel(module, num_blocks=num_blocks, block_size_tokens=BLOCK_TOKENS)
    language = PretrainedLanguage(folder)

    def text_of(name: str, tokens: int) -> list[TokenId]:
        return language.encode(prose(name, words=tokens))[:tokens]

    name = f"SmolLM2-135M, {layers or len(module.model.layers)} layers, float32, one CPU thread"
    return Bench(model, name, num_blocks, text_of, whole=False)


def prepare_shape(shape: str, *, device_name: str, num_blocks: int) -> Bench:
    """Return a bench of random weights of one of `SHAPES`, made on the device. The texts are random tokens.
    Raise ModelError if there is no such device.
    """
    torch.set_num_threads(1)
    device = hf.choose_device(device_name)
    dtype = hf.choose_dtype("auto", device=device)
    config = LlamaConfig(**SHAPES[shape], max_position_embeddings=8192, tie_word_embeddings=False)
    torch.manual_seed(0)
    with device:
        module = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model = hf.PagedModel(module, num_blocks=num_blocks, block_size_tokens=BLOCK_TOKENS)

    def text_of(name: str, tokens: int) -> list[TokenId]:
        rng = random.Random(name)
        return [TokenId(rng.randrange(config.vocab_size)) for _ in range(tokens)]

    on = torch.cuda.get_device_name() if device.type == "cuda" else "the CPU"
    model_name = f"random weights, shape {shape}, {str(dtype).removeprefix('torch.')}, on {on}"
    bench = Bench(model, model_name, num_blocks, text_of, whole=device.type == "cuda")
    # A GPU loads each kernel when it is first used, and the side that runs first would pay for it.
    first = [request(str(n), text_of(f"first {n}", 512), max_tokens=4) for n in range(6)]
    finish(bench, engine_of(bench, cache=False), first)
    return bench


def request(name: str, prompt: Sequence[TokenId], *, max_tokens: int, arrival_s: float = 0.0) -> Request:
    """Return a request that never ends before `max_tokens`."""
    return Request(
        RequestId(name),
        list(prompt),
        max_tokens=max_tokens,
        arrival_s=arrival_s,
        ignore_eos=True,
    )


def config_of(
    bench: Bench, *, cache: bool, options: CacheOptions | None = None, batch_tokens: int = 2048
) -> EngineConfig:
    """Return the engine's configuration. `options` are the options of the cache, if it is on."""
    return EngineConfig(
        num_blocks=bench.num_blocks,
        block_size_tokens=BLOCK_TOKENS,
        enable_prefix_caching=cache,
        eos_token_id=NO_TOKEN,
        cache=(options if cache else None) or CacheOptions(),
        limits=SchedulerLimits(max_num_seqs=256 if bench.whole else 64, max_num_batched_tokens=batch_tokens),
    )


def engine_of(bench: Bench, *, cache: bool, options: CacheOptions | None = None) -> Engine:
    return Engine(config_of(bench, cache=cache, options=options), HfRunner(bench.model))


def finish(bench: Bench, engine: Engine, requests: Sequence[Request], kept: Kept | None = None) -> float:
    """Run all requests to their ends. Return the seconds. `kept` gets the share that is not the model's."""
    started, model_s = bench.now_s(), 0.0
    for one in requests:
        engine.add(one)
    while engine.num_unfinished:
        plan = engine.begin(now=time.monotonic())
        computing = bench.now_s()
        result = engine.runner.execute(plan)
        model_s += bench.now_s() - computing
        engine.finish(plan, result, now=time.monotonic())
    seconds = bench.now_s() - started
    if kept is not None:
        kept.add("001-8 core share", 1 - model_s / seconds)
    return seconds


def hit_share(requests: Sequence[Request]) -> float:
    """Return the cached prompt tokens divided by all prompt tokens."""
    return sum(r.num_cached_tokens or 0 for r in requests) / sum(r.num_prompt_tokens for r in requests)


@dataclass(slots=True)
class Kept:
    """Measurements by name, in the order of the repeats. They contain this run's measurements and the kept
    ones of earlier runs.
    """

    series: dict[str, list[float]]
    repeats: dict[str, int] = field(default_factory=dict)
    """The number of complete repeats of each row."""

    def add(self, name: str, value: float) -> None:
        self.series.setdefault(name, []).append(value)

    def median(self, name: str) -> float:
        return median(self.series[name])

    def ratios(self, word: str, over: str, under: str) -> Figures:
        """Return the ratios within the repeats: the median under `word`, mean and extremes under their own
        names.
        """
        ratios = [a / b for a, b in zip(self.series[over], self.series[under], strict=True)]
        return {
            word: median(ratios),
            "mean": fmean(ratios),
            "of the repeats": f"{min(ratios):.2f} to {max(ratios):.2f}",
        }

    def in_turns(
        self, sides: Mapping[str, Callable[[int], float]], *, repeats: int, say: Callable[[str], None]
    ) -> None:
        """Run each side once in every repeat. The order changes from one repeat to the next. Each figure is
        added under the name of its side.

        A side gets the number of the repeat, which continues from the kept ones.
        """
        first = len(self.series.get(next(iter(sides)), ()))
        for repeat in range(first, first + repeats):
            for name in list(sides)[:: 1 if repeat % 2 else -1]:
                self.add(name, sides[name](repeat))
                say(f"repeat {repeat + 1}, {name}: {self.series[name][-1]:.3f}")
