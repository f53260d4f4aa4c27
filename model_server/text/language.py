"""The text functions that the server needs from a model. They turn prompts into tokens, and tokens into text,
piece by piece or all at once.

There are two kinds: `standin`, for a made-up model, and `pretrained`, with the tokenizer and chat template of
a real model. Callers: the request reader, the driver.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

from model_server.core.request import Constraint, TokenId

NO_VARIABLES: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class ChatMessage:
    role: str
    content: str
    tool_calls: Sequence[Any] = ()
    """The fields hold the client's values, unchanged."""


class UnknownTokenError(Exception):
    """The token cannot be turned back into text. The message says why."""


class ChatTemplateError(Exception):
    """The model's template refuses this conversation, or there is no template."""


class SchemaError(Exception):
    """An answer of this schema cannot be made here. The message says why."""


@dataclass(frozen=True, slots=True)
class Alternative:
    """A form of an answer: a JSON text of a schema, between two fixed texts."""

    schema: Any
    before: str = ""
    after: str = ""


class Detokenizer(Protocol):
    """Turns one answer's tokens into text, piece by piece. The pieces together are the answer."""

    def feed(self, token_id: TokenId) -> str:
        """Return the text that this token completes. The text is empty while the token ends inside a
        character.
        """
        ...

    def flush(self) -> str:
        """Return the text that was held back, because the answer has ended. The text may stand for an
        unfinished character.
        """
        ...


class Language(Protocol):
    @property
    def eos_token_ids(self) -> Sequence[TokenId]:
        """Return the tokens that end an answer, the usual one first."""
        ...

    @property
    def longest_token_characters(self) -> int:
        """Return the most characters that one token stands for. A text with more characters than this for
        each allowed token is too long, and its tokens need not be counted.
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
        """Return the conversation as the model reads it, ready for its answer. `variables` are variables of
        the model's own template that the client sets, such as `enable_thinking`. Raise ChatTemplateError
        if the template refuses the conversation.
        """
        ...

    def decode(self, token_ids: Sequence[TokenId]) -> str:
        """Return the text, with special tokens. Raise UnknownTokenError for a token without text."""
        ...

    def constraints(self, alternatives: Sequence[Alternative], *, count: int) -> Sequence[Constraint]:
        """Return what lets an answer have only one of these forms, for each of `count` answers. Raise
        SchemaError if the schemas are beyond llguidance.
        """
        ...

    def detokenizer(self, prompt: Sequence[TokenId], *, constraint: Constraint | None = None) -> Detokenizer:
        """Return a detokenizer for the answer to this prompt. The prompt may decide whether the answer begins
        with a space.
        """
        ...
