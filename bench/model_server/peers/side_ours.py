"""Runs our engine as one of the compared engines."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import torch

from bench.model_server.peers import worker
from bench.model_server.peers.work import BATCH_TOKENS, BLOCK_TOKENS, MAX_REQUESTS, Prompt
from model_server.core.engine import Engine, EngineConfig
from model_server.core.request import NO_TOKEN, Request, RequestId, TokenId
from model_server.core.scheduler import SchedulerLimits
from model_server.runners.hf import model as hf
from model_server.runners.hf.runner import HfRunner


class Ours:
    version = f"on transformers {version('transformers')}"

    def __init__(self, folder: Path, *, cache: bool, num_blocks: int) -> None:
        torch.set_num_threads(1)
        module = hf.load(folder, device=torch.device("cpu"), dtype=torch.float32)
        model = hf.PagedModel(module, num_blocks=num_blocks, block_size_tokens=BLOCK_TOKENS)
        config = EngineConfig(
            num_blocks=num_blocks,
            block_size_tokens=BLOCK_TOKENS,
            enable_prefix_caching=cache,
            eos_token_id=NO_TOKEN,
            limits=SchedulerLimits(max_num_seqs=MAX_REQUESTS, max_num_batched_tokens=BATCH_TOKENS),
        )
        self._engine = Engine(config, HfRunner(model))
        self._begun: dict[int, Request] = {}

    def forget(self) -> None:
        self._engine.kv_cache.reset_prefix_cache()

    def answer(self, prompts: Sequence[Prompt], *, answer_tokens: int) -> tuple[list[list[int]], int]:
        made = [_request(n, prompt, answer_tokens=answer_tokens) for n, prompt in enumerate(prompts)]
        for one in made:
            self._engine.add(one)
        while self._engine.num_unfinished:
            self._engine.step(now=0.0)
        return [list(r.token_ids[r.num_prompt_tokens :]) for r in made], sum(
            r.num_cached_tokens or 0 for r in made
        )

    def begin(self, number: int, prompt: Prompt, *, answer_tokens: int) -> None:
        self._begun[number] = _request(number, prompt, answer_tokens=answer_tokens)
        self._engine.add(self._begun[number])

    def step(self) -> dict[int, list[int]]:
        outputs, _ = self._engine.step(now=0.0)
        return {int(output.request.request_id): [int(output.token_id)] for output in outputs}

    def hit_tokens(self, number: int) -> int:
        return self._begun[number].num_cached_tokens or 0


def _request(number: int, prompt: Prompt, *, answer_tokens: int) -> Request:
    tokens = [TokenId(token) for token in prompt]
    return Request(RequestId(str(number)), tokens, max_tokens=answer_tokens, arrival_s=0.0, ignore_eos=True)


if __name__ == "__main__":
    worker.main(Ours)
