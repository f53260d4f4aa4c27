"""The two backends of a server: a made-up model and a real model. No other module knows both.

Torch is imported only for a real model.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from model_server.core.engine import Runner, StepResult
from model_server.core.request import TokenId
from model_server.core.scheduler import StepPlan
from model_server.runners.cost import CostModel, CostRunner
from model_server.server.staging import Tiers
from model_server.text.answers import Answers
from model_server.text.language import Language
from model_server.text.standin import StandInLanguage
from model_server.text.tokenizer import Tokenizer
from model_server.tiers.settings import KvStoreSettings
from model_server.weights.cache import WeightsError
from model_server.weights.known import find

if TYPE_CHECKING:
    from model_server.runners.hf.model import PagedModel

DEFAULT_COST_BLOCKS = 4096
DEFAULT_HF_BLOCKS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class CostSettings:
    """The settings of a server without a model. Its steps take as long as `costs` say, and its words are made
    up.
    """

    costs: CostModel
    mean_answer_tokens: int = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class HfSettings:
    """The settings of a real model, which this process computes."""

    device: str = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    threads: int | None = None
    """The number of torch's threads on a CPU. None means half of the cores, because two engines on one core
    slow each other down.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    runner: Runner
    language: Language
    made_up: bool
    max_len_tokens: int | None
    """The longest prompt plus answer that the model itself allows. None means any length."""
    vocabulary_size: int | None
    """The number of the model's tokens, which are numbered from 0. None means that any number is a token."""
    compute: Callable[[StepPlan], Awaitable[StepResult]] | None
    """Runs the steps. None means that the runner itself takes no time."""
    step_thread: Executor | None
    """The one thread in which `compute` runs."""
    tiers: Tiers | None
    """The store of prefixes below the engine's blocks."""
    about: str
    """One line for the person who started the server. It is empty if there is nothing to say."""

    @property
    def eos_token_ids(self) -> Sequence[TokenId]:
        return self.language.eos_token_ids


def made_up(settings: CostSettings, *, max_loras: int) -> Backend:
    tokenizer = Tokenizer()
    answers = Answers(tokenizer, mean_tokens=settings.mean_answer_tokens)
    return Backend(
        runner=CostRunner(settings.costs, max_loras=max_loras, next_token=answers.next_token),
        language=StandInLanguage(tokenizer, eos_token_id=answers.eos_token_id),
        made_up=True,
        max_len_tokens=None,
        vocabulary_size=None,
        compute=None,
        step_thread=None,
        tiers=None,
        about="",
    )


def real(
    settings: HfSettings,
    *,
    model: str,
    num_blocks: int,
    block_size_tokens: int,
    kv_store: KvStoreSettings | None,
    progress: Callable[[str], None],
) -> Backend:
    """Return the backend of a real model. Raise WeightsError if the model does not exist, or torch is not
    installed. Raise ModelError if the model cannot be served, and StoreError if the store cannot be used.
    """
    try:
        from model_server.runners.hf import model as hf  # noqa: PLC0415 - needs torch
        from model_server.text.pretrained import PretrainedLanguage  # noqa: PLC0415 - needs transformers
    except ImportError as error:
        raise WeightsError(
            f"--runner hf computes with torch and transformers, but {error.name or error} is not installed: "
            "run pip install 'prefix-gateway[engine]'"
        ) from error
    folder = find(model, progress=progress)
    device = hf.choose_device(settings.device)
    dtype = hf.choose_dtype(settings.dtype, device=device)
    threads = settings.threads or max(1, (os.cpu_count() or 2) // 2)
    hf.use_threads(threads)
    language = PretrainedLanguage(folder)
    paged = hf.PagedModel(
        hf.load(folder, device=device, dtype=dtype),
        num_blocks=num_blocks,
        block_size_tokens=block_size_tokens,
    )
    runner, tiers = _with_tiers(paged, kv_store, folder)
    step_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine-step")

    async def compute(plan: StepPlan) -> StepResult:
        """Compute a step in its thread, so that the event loop can answer meanwhile."""
        return await asyncio.get_running_loop().run_in_executor(step_thread, runner.execute, plan)

    about = f"{folder} on {f'{threads} threads' if device.type == 'cpu' else device}"
    return Backend(
        runner=runner,
        language=language,
        made_up=False,
        max_len_tokens=paged.max_len_tokens,
        vocabulary_size=int(paged.module.get_input_embeddings().num_embeddings),
        compute=compute,
        step_thread=step_thread,
        tiers=tiers,
        about=f"{about}, {_memory(paged, kv_store)}",
    )


def _memory(paged: PagedModel, kv_store: KvStoreSettings | None) -> str:
    memory = paged.memory
    tokens = memory.data.shape[2] * memory.block_size_tokens
    stored = f"; prefixes stored in {kv_store.folder}" if kv_store is not None else ""
    dtype = str(memory.shape.dtype).removeprefix("torch.")
    return f"{dtype}; KV cache of {tokens:,} tokens, {memory.data.nbytes / 1e9:.2f} GB{stored}"


def _with_tiers(
    paged: PagedModel, settings: KvStoreSettings | None, folder: Path
) -> tuple[Runner, Tiers | None]:
    from model_server.runners.hf.runner import HfRunner  # noqa: PLC0415 - needs torch
    from model_server.tiers import owned_folder, serving  # noqa: PLC0415 - needs torch

    if settings is None:
        return HfRunner(paged), None
    tiers = serving.ServedTiers(
        paged,
        settings,
        runner=HfRunner(paged),
        fingerprint=owned_folder.fingerprint(folder),
        clock=time.monotonic,
    )
    paged.view_for = serving.view_for
    return tiers, tiers
