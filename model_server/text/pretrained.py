"""The language of a real model: its own tokenizer and chat template, which transformers reads from its
folder.

In a stream the text of a token is final when the text up to this token no longer ends inside a character.
Only the tokens since the last final token are decoded again, so a token of a long answer costs no more than a
token of a short answer. These tokens are decoded together with a few tokens before them, because in many
tokenizers a token's text depends on the token before it.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError
from transformers import AutoTokenizer, GenerationConfig

from model_server.core.request import Constraint, TokenId
from model_server.text.grammar import NOT_INSTALLED, Grammar, matcher
from model_server.text.language import (
    NO_VARIABLES,
    Alternative,
    ChatMessage,
    ChatTemplateError,
    SchemaError,
    UnknownTokenError,
)

_CONTEXT_TOKENS = 5
_UNFINISHED = "\ufffd"
"""The text that a decoder writes for the beginning of an unfinished character."""


class PretrainedLanguage:
    def __init__(self, folder: Path) -> None:
        """Raise ValueError or OSError if the folder has no tokenizer that can be read."""
        self._tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        self.eos_token_ids = tuple(TokenId(token) for token in _eos(folder, self._tokenizer))
        self.longest_token_characters = max(map(len, self._tokenizer.get_vocab()), default=1)

    def encode(self, text: str) -> list[TokenId]:
        tokens: list[TokenId] = self._tokenizer(text, verbose=False)["input_ids"]
        return tokens

    def encode_chat(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[Any] | None = None,
        variables: Mapping[str, Any] = NO_VARIABLES,
    ) -> list[TokenId]:
        if not self._tokenizer.chat_template:
            raise ChatTemplateError("This model has no chat template; use /v1/completions.")
        plain = [_as_template_reads(message) for message in messages]
        settings = {"add_generation_prompt": True, **variables}
        if taken := sorted(_not_variables(self._tokenizer) & settings.keys()):
            raise ChatTemplateError(f"{', '.join(taken)} cannot be set for the model's chat template.")
        try:
            tokens: list[TokenId] = self._tokenizer.apply_chat_template(
                plain, tools=tools or None, tokenize=True, return_dict=False, **settings
            )
        except (TemplateError, TypeError, ValueError, RecursionError) as error:
            raise ChatTemplateError(f"The model's chat template refuses these messages: {error}") from error
        return tokens

    def decode(self, token_ids: Sequence[TokenId]) -> str:
        size = len(self._tokenizer)
        unknown = next((token for token in token_ids if token >= size), None)
        if unknown is not None:
            raise UnknownTokenError(f"Token {unknown} does not exist: this model has {size} tokens.")
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=False)
        return text

    @cached_property
    def _for_grammars(self) -> Any:
        """Return the tokenizer as llguidance reads it, which takes a second to make."""
        from llguidance.hf import from_tokenizer  # noqa: PLC0415 - it is an extra

        return from_tokenizer(self._tokenizer, eos_token=list(self.eos_token_ids))

    def constraints(self, alternatives: Sequence[Alternative], *, count: int) -> Sequence[Grammar]:
        if not self.eos_token_ids:
            raise SchemaError("the model has no token that ends an answer")
        try:
            made = matcher(alternatives, self._for_grammars)
        except ImportError as error:
            raise SchemaError(NOT_INSTALLED) from error
        except ValueError as error:
            raise SchemaError(f"llguidance cannot read the model's tokenizer: {error}") from error
        return [Grammar(made.deep_copy(), eos_token_ids=self.eos_token_ids) for _ in range(count)]

    def detokenizer(self, prompt: Sequence[TokenId], *, constraint: Constraint | None = None) -> _Growing:  # noqa: ARG002 - the model's tokens have their text
        return _Growing(self._tokenizer, prompt[-_CONTEXT_TOKENS:])


class _Growing:
    """An unfinished answer. The text of `_tokens[_settled:]` was not returned yet."""

    def __init__(self, tokenizer: Any, context: Sequence[TokenId]) -> None:
        self._tokenizer = tokenizer
        self._tokens = list(context)
        self._settled = len(self._tokens)

    def feed(self, token_id: TokenId) -> str:
        self._tokens.append(token_id)
        piece = self._new_text()
        if piece.endswith(_UNFINISHED) and len(self._tokens) - self._settled < _CONTEXT_TOKENS:
            return ""
        self._settle()
        return piece

    def flush(self) -> str:
        piece = self._new_text()
        self._settle()
        return piece

    def _new_text(self) -> str:
        before = self._decode(self._tokens[: self._settled])
        return self._decode(self._tokens)[len(before) :]

    def _settle(self) -> None:
        self._tokens = self._tokens[-_CONTEXT_TOKENS:]
        self._settled = len(self._tokens)

    def _decode(self, tokens: Sequence[TokenId]) -> str:
        text: str = self._tokenizer.decode(
            tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text


def _eos(folder: Path, tokenizer: Any) -> list[int]:
    """Return the end tokens of the tokenizer first, then those of the model's generation settings."""
    found = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    if (folder / "generation_config.json").is_file():
        more = GenerationConfig.from_pretrained(folder, local_files_only=True).eos_token_id
        listed = more if isinstance(more, list) else [more]
        found += [token for token in listed if token is not None and token not in found]
    return found


def _not_variables(tokenizer: Any) -> set[str]:
    """Return the arguments of the template's call that clients may not set. They choose the template and its
    input.
    """
    ours = set(inspect.signature(tokenizer.apply_chat_template).parameters)
    return ours - {"add_generation_prompt", "continue_final_message"}


def _as_template_reads(message: ChatMessage) -> dict[str, Any]:
    calls = {"tool_calls": list(message.tool_calls)} if message.tool_calls else {}
    return {"role": message.role, "content": message.content, **calls}
