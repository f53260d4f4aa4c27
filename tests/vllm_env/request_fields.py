"""Prints the fields of vLLM's request classes with their defaults. It runs inside the vLLM environment, not
in ours, and prints a JSON object on its last line. `tests/contract/data/request_fields.json` is that object,
for runs without vLLM. `recording` calls this program.
"""

from __future__ import annotations

import json
from typing import Any


def all_fields() -> dict[str, dict[str, Any]]:
    """Return field -> default, by API. Made-up ids and required fields have null."""
    # The import stands here, because our own environment imports this folder too.
    from pydantic_core import PydanticUndefined  # noqa: PLC0415
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest  # noqa: PLC0415
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest  # noqa: PLC0415
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest  # noqa: PLC0415
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest  # noqa: PLC0415
    from vllm.entrypoints.pooling.embed.protocol import EmbeddingCompletionRequest  # noqa: PLC0415

    def default(name: str, field: Any) -> Any:
        value = field.get_default(call_default_factory=True)
        return None if name == "request_id" or value is PydanticUndefined else value

    kinds = {
        "completions": CompletionRequest,
        "chat": ChatCompletionRequest,
        "messages": AnthropicMessagesRequest,
        "responses": ResponsesRequest,
        "embeddings": EmbeddingCompletionRequest,
    }
    return {
        api: {name: default(name, field) for name, field in sorted(kind.model_fields.items())}
        for api, kind in kinds.items()
    }


if __name__ == "__main__":
    print(json.dumps(all_fields()))
