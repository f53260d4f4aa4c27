"""What the server needs of a model's text: prompts to tokens, tokens to text, as they come and all at once.

Two kinds exist: `standin`, for a model that makes its words up, and `pretrained`,
the tokenizer and chat template of a real one. Callers: the request reader, the driver.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

from model_server.core.request import TokenId

NO_VARIABLES: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class ChatMessage:
    role: str
    content: str
    tool_calls: Sequence[Any] = ()
    """As the client sent them."""


class UnknownTokenError(Exception):
    """The token cannot be turned back into text; the message says why."""


class ChatTemplateError(Exception):
    """The model's template does not take this conversation, or there is no template."""


class Detokenizer(Protocol):
    """One answer's tokens to text, piece by piece. The pieces together are the answer."""

    def feed(self, token_id: TokenId) -> str:
        """What this token settles; nothing while it ends within a character."""
        ...

    def flush(self) -> str:
        """What has been held back, as well as it can be shown: the answer has ended."""
        ...


class Language(Protocol):
    @property
    def eos_token_ids(self) -> Sequence[TokenId]:
        """The tokens that end an answer, the usual one first."""
        ...

    @property
    def longest_token_characters(self) -> int:
        """No token stands for more of a text, so a text of so many for each token is too long without
        counting.
        """
        ...

    def encode(self, text: str) -> list[TokenId]: ...

    def encode_chat(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[Any] | None = None,
        variables: Mapping[str, Any] = NO_VARIABLES,
    ) -> list[TokenId]:
        """The conversation as the model reads it, ready for its answer. ChatTemplateError.

        `variables`: what the client sets in the model's own template, `enable_thinking` for example.
        """
        ...

    def decode(self, token_ids: Sequence[TokenId]) -> str:
        """Special tokens included. UnknownTokenError."""
        ...

    def detokenizer(self, prompt: Sequence[TokenId]) -> Detokenizer:
        """For the answer to this prompt: whether it begins with a space may depend on what came before."""
        ...
