"""Provides the inputs of the tiers' benchmarks: text that every Python includes, and a model that runs
without an engine.
"""

import importlib
import json
import pydoc
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from model_server.core.blocks import Block, BlockId
from model_server.core.request import Request, RequestId, TokenId
from model_server.core.scheduler import Chunk
from model_server.runners.hf.attention import PagedStep
from model_server.runners.hf.batch import make_batch
from model_server.runners.hf.memory import KvMemory
from model_server.runners.hf.model import PagedModel
from model_server.runners.hf.views import KvView
from model_server.text.pretrained import PretrainedLanguage

_MODULES = """
argparse csv datetime decimal difflib enum fractions heapq http.client imaplib inspect ipaddress
json logging mailbox math os pathlib pickle pprint random re shutil smtplib socket sqlite3 ssl
statistics string struct subprocess tarfile tempfile textwrap threading tokenize types unittest
urllib.request uuid xml.dom zipfile asyncio bisect calendar collections configparser contextlib
copy dataclasses email.message functools gzip hashlib itertools
"""
MODULES = _MODULES.split()


def manual_pages() -> Iterator[str]:
    for name in MODULES:
        pages = pydoc.TextDoc()
        pages.bold = str  # type: ignore[assignment]  # no overstriking: the way to pydoc.plaintext that is typed
        yield pages.document(importlib.import_module(name))


def conversations(file: Path) -> Iterator[str]:
    """Yield the conversations of a file in ShareGPT's form. Its end may be missing."""
    text, at = file.read_text(), 0
    with suppress(ValueError):
        while True:
            record, at = json.JSONDecoder().raw_decode(text, text.index("{", at))
            yield "\n\n".join(turn["value"] for turn in record["conversations"])


def cut(
    texts: Iterable[str], language: PretrainedLanguage, *, length_tokens: int, count: int
) -> list[list[int]]:
    """Return the first of the texts that are long enough, each cut to a length."""
    found = []
    for text in texts:
        token_ids = language.encode(text[: 12 * length_tokens])
        if len(token_ids) >= length_tokens:
            found.append([int(token) for token in token_ids[:length_tokens]])
        if len(found) == count:
            return found
    raise SystemExit(f"only {len(found)} texts have {length_tokens} tokens; ask for fewer samples")


@dataclass(frozen=True, slots=True, eq=False)
class MemorySource:
    """A prefix in paged memory. Nothing is read from another tier, and only the attention is selective."""

    memory: KvMemory
    blocks: torch.Tensor
    num_tokens: int
    probe_kv_heads: int

    def probe_keys(self, layer: int) -> torch.Tensor:
        return self._all(layer)[0][:, : self.probe_kv_heads]

    def chunks(self, _layer: int) -> None:
        return None

    def read(self, layer: int, tokens: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self._all(layer)
        return (keys, values) if tokens is None else (keys[tokens], values[tokens])

    def _all(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = (
            read.flatten(0, 1)[: self.num_tokens] for read in self.memory.read(layer, self.blocks)
        )
        return keys, values


class Sequencer:
    """Computes any part of one sequence at a time in a paged model, and returns all logits of that part."""

    def __init__(self, module: Any, *, max_tokens: int, block_size_tokens: int = 16) -> None:
        num_blocks = -(-max_tokens // block_size_tokens)
        self.model = PagedModel(module, num_blocks=num_blocks, block_size_tokens=block_size_tokens)
        self.table = [Block(BlockId(number)) for number in range(num_blocks)]

    @property
    def blocks(self) -> torch.Tensor:
        return torch.arange(len(self.table), device=self.model.memory.device)

    def compute(
        self, token_ids: Sequence[int], *, start: int, view: KvView | None = None, num_logits: int = 0
    ) -> torch.Tensor:
        """Return logits of shape (num_logits or all, vocabulary) for the last of the positions [start, end of
        sequence).
        """
        request = Request(RequestId("sample"), [TokenId(t) for t in token_ids], max_tokens=1, arrival_s=0.0)
        num_tokens = len(token_ids) - start
        memory = self.model.memory
        batch = make_batch(
            [Chunk(request, start, num_tokens, samples=True, table=self.table)],
            memory=memory,
            view_for=lambda _: view,
        )
        with torch.inference_mode():
            out = self.model.module(
                input_ids=batch.token_ids,
                position_ids=batch.positions,
                logits_to_keep=num_logits or num_tokens,
                use_cache=False,
                paged=PagedStep(batch, memory),
            )
        logits: torch.Tensor = out.logits[0]
        return logits
