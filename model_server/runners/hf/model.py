"""A transformers decoder over paged memory: takes the chunks of a plan, and returns logits.

`load` reads a model folder; `PagedModel` computes. It keeps no state of requests: the plan and the memory
contain everything about a request. Callers: the runner, benchmarks.
"""

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from model_server.core.scheduler import StepPlan
from model_server.runners.hf import attention
from model_server.runners.hf.batch import StepBatch, make_batch
from model_server.runners.hf.captured import CapturedSteps
from model_server.runners.hf.errors import ModelError, UnsupportedModelError
from model_server.runners.hf.memory import KvMemory, KvShape
from model_server.runners.hf.views import ViewFor, no_view

DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
_MALLOPT = ((-3, 32 << 20), (-1, 512 << 20), (-2, 32 << 20))
"""M_MMAP_THRESHOLD (glibc takes no larger one), M_TRIM_THRESHOLD, M_TOP_PAD of <malloc.h>, in bytes."""


def choose_device(name: str) -> torch.device:
    """Return the device. `auto` is the first GPU if there is one. Raise ModelError if the wanted device does
    not exist.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ModelError(f"there is no device {name}: torch sees no GPU here; use --device cpu")
    return device


def choose_dtype(name: DtypeName, *, device: torch.device) -> torch.dtype:
    """Return the data type. `auto` is float32 on CPUs, where half precision is slow, and bfloat16
    elsewhere.
    """
    if name == "auto":
        name = "float32" if device.type == "cpu" else "bfloat16"
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def use_threads(count: int) -> None:
    """Set how many threads torch may use on the CPU, for the whole process."""
    torch.set_num_threads(count)


def load(folder: Path, *, device: torch.device, dtype: torch.dtype) -> Any:
    """Load a model folder (config.json and safetensors) as a module of transformers, ready to compute.
    Nothing is downloaded.
    """
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} holds no model: it needs config.json and *.safetensors")
    transformers_logging.disable_progress_bar()  # progress bars would fill the server's log
    try:
        module = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ModelError(f"the model in {folder} cannot be loaded: {error}") from error
    module.to(device)
    if device.type == "cpu":
        keep_freed_memory()
    return module


def keep_freed_memory() -> bool:
    """Keep the memory of a step's large temporary tensors in the process. glibc would return it to the
    system, and clear each page again in the next step, which takes a tenth of a prefill's time. Return
    whether the C library accepted the setting.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    taken = [mallopt is not None and mallopt(*each) for each in _MALLOPT]
    return all(taken)


class PagedModel:
    """Wraps a transformers model and replaces its attention."""

    def __init__(
        self, module: Any, *, num_blocks: int, block_size_tokens: int, view_for: ViewFor = no_view
    ) -> None:
        attention.register()
        try:
            module.set_attn_implementation(attention.NAME)
        except ValueError as error:
            raise UnsupportedModelError(
                f"{type(module).__name__} does not take attention functions by name: {error}"
            ) from error
        self.module = module.eval()
        self.view_for = view_for
        self.memory = KvMemory(
            kv_shape(module),
            num_blocks=num_blocks,
            block_size_tokens=block_size_tokens,
            device=module.device,
        )
        self._captured: CapturedSteps | None = None

    @property
    def max_len_tokens(self) -> int:
        """Return the most positions that the model was made for."""
        return int(self.module.config.max_position_embeddings)

    def forward(self, plan: StepPlan) -> Sequence[torch.Tensor]:
        """Return the logits after the last token of each chunk, each of the shape (vocabulary,)."""
        self.memory.copy(plan.copies)
        if not plan.chunks:
            return ()
        batch = make_batch(plan.chunks, memory=self.memory, view_for=self.view_for)
        packed = batch.packed
        # Contexts that share blocks may be longer than the memory. Their copies would stay with the graph.
        captures = (
            packed is not None and packed.most_rows == 1 and len(packed.slots) <= self.memory.spare_slot
        )
        with torch.inference_mode():
            if packed is None or not captures or batch.longs:
                logits = self._compute(batch)
            else:
                self._captured = self._captured or CapturedSteps(self.memory, self._compute)
                logits = self._captured.compute(batch, packed)
        rows: Sequence[torch.Tensor] = logits.unbind(0)
        return rows

    def _compute(self, batch: StepBatch) -> torch.Tensor:
        out = self.module(
            input_ids=batch.token_ids,
            position_ids=batch.positions,
            logits_to_keep=batch.last_rows,
            use_cache=False,
            paged=attention.PagedStep(batch, self.memory),
        )
        logits: torch.Tensor = out.logits[0]
        return logits


def kv_shape(module: Any) -> KvShape:
    config = module.config
    heads = int(config.num_attention_heads)
    return KvShape(
        num_layers=int(config.num_hidden_layers),
        num_kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        head_dim=int(getattr(config, "head_dim", None) or config.hidden_size // heads),
        dtype=module.dtype,
    )
