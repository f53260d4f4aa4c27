"""Runs transformers' own continuous batching as one of the compared engines: its manager, its paged attention
by SDPA, and its sharing of equal blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from bench.model_server.peers import worker
from bench.model_server.peers.work import BATCH_TOKENS, BLOCK_TOKENS, MAX_REQUESTS, Prompt


class Transformers:
    version = str(transformers.__version__)

    def __init__(self, folder: Path, *, cache: bool, num_blocks: int) -> None:
        torch.set_num_threads(1)
        module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
        self._manager = module.eval().init_continuous_batching(
            generation_config=GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=16),
            continuous_batching_config=ContinuousBatchingConfig(
                page_size=BLOCK_TOKENS,
                num_blocks=num_blocks,
                max_batch_tokens=BATCH_TOKENS,
                max_requests_per_batch=MAX_REQUESTS,
                allow_block_sharing=cache,
            ),
        )
        self._manager.warmup()
        self._manager.start()
        self._cache: Any = self._manager.batch_processor.cache
        if self._cache.use_prefix_sharing is not cache:
            raise RuntimeError("this version of transformers does not share prefixes of this model")
        self._hits = 0
        search = self._cache.search_prefix_match

        def counted(request_id: str, prompt: list[int]) -> int:
            found = int(search(request_id, prompt))
            self._hits += found
            return found

        self._cache.search_prefix_match = counted  # transformers does not report how many tokens it found

    def forget(self) -> None:
        self._cache.evict_cached_blocks()
        self._hits = 0

    def close(self) -> None:
        """End the engine's thread."""
        self._manager.stop(block=True)

    def answer(self, prompts: Sequence[Prompt], *, answer_tokens: int) -> tuple[list[list[int]], int]:
        before = self._hits
        names = self._manager.add_requests(list(prompts), max_new_tokens=answer_tokens)
        answers: dict[str, list[int]] = {}
        while len(answers) < len(names):
            result = self._manager.get_result(timeout=1)
            if result is None and not self._manager.is_running():
                raise RuntimeError("transformers' generation thread has ended")
            if result is not None and result.is_finished():
                if result.error is not None:
                    raise RuntimeError(f"transformers: {result.error}")
                answers[result.request_id] = list(result.generated_tokens)
        return [answers[name] for name in names], self._hits - before


if __name__ == "__main__":
    worker.main(Transformers)
