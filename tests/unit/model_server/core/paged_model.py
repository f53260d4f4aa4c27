"""A model without weights. Its answers depend on every KV slot that it reads through the block table.

Each slot of each block holds what was written there. The next token is a hash of the context as read back
from the slots. So a wrong table, a missing copy or an overwritten slot changes the answer.
"""

import hashlib
from collections.abc import Sequence

from model_server.core.engine import StepResult
from model_server.core.request import Request, TokenId
from model_server.core.scheduler import Chunk, StepPlan

VOCABULARY = 97


class PagedModel:
    """The engine's runner."""

    def __init__(self, *, block_size_tokens: int) -> None:
        self._size = block_size_tokens
        self._slots: dict[tuple[int, int], tuple[int, str]] = {}
        self.num_prefills = 0
        self.num_copies = 0
        self.computed_tokens = 0

    def forward(self, plan: StepPlan) -> Sequence[object]:
        for copy in plan.copies:
            self.num_copies += 1
            for slot in range(copy.num_tokens):
                self._slots[copy.target.block_id, slot] = self._slots[copy.source.block_id, slot]
        for chunk in plan.chunks:
            self._write(chunk)
        return [self._read(chunk) for chunk in plan.chunks]

    def execute(self, plan: StepPlan) -> StepResult:
        values = []
        for value, chunk in zip(self.forward(plan), plan.chunks, strict=True):
            if chunk.kept is not None:
                assert chunk.kept.last_logits == value, "the kept logits differ from those of the blocks"
            values.append(value)
        return StepResult(
            [
                greedy(value, chunk.request) if chunk.samples else None
                for value, chunk in zip(values, plan.chunks, strict=True)
            ],
            0.0,
            last_logits=[
                value if chunk.keeps_logits else None
                for value, chunk in zip(values, plan.chunks, strict=True)
            ],
        )

    def _write(self, chunk: Chunk) -> None:
        self.num_prefills += chunk.start < chunk.request.num_prompt_tokens
        self.computed_tokens += chunk.num_tokens
        for position in range(chunk.start, chunk.start + chunk.num_tokens):
            index, slot = divmod(position, self._size)
            key = chunk.table[index].block_id, slot
            self._slots[key] = (chunk.request.token_ids[position], repr(chunk.request.adapter))

    def _read(self, chunk: Chunk) -> str:
        context = []
        for position in range(chunk.start + chunk.num_tokens):
            index, slot = divmod(position, self._size)
            context.append(self._slots[chunk.table[index].block_id, slot])
        return hashlib.sha256(repr(context).encode()).hexdigest()


def greedy(logits: object, request: Request) -> TokenId:
    del request
    assert isinstance(logits, str)
    return TokenId(int(logits[:8], 16) % VOCABULARY)


def answer_alone(request: Request) -> list[TokenId]:
    """Return the model's answer from a context that no other request shares."""
    tokens = [(token, repr(request.adapter)) for token in request.token_ids[: request.num_prompt_tokens]]
    answer: list[TokenId] = []
    for _ in range(request.max_tokens):
        digest = hashlib.sha256(repr(tokens).encode()).hexdigest()
        answer.append(greedy(digest, request))
        tokens.append((answer[-1], repr(request.adapter)))
    return answer
