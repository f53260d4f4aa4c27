"""The language of a made-up model: the stand-in tokenizer and chat template, as one `Language`."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from model_server.core.request import Constraint, TokenId
from model_server.text.answers import END_MARKER
from model_server.text.grammar import small_answer
from model_server.text.language import NO_VARIABLES, Alternative, ChatMessage, Detokenizer, UnknownTokenError
from model_server.text.tokenizer import LONGEST_PIECE_CHARACTERS, PIECES, Tokenizer


def render_chat(messages: Sequence[ChatMessage], *, tools_json: str = "") -> str:
    """Return the prompt of a conversation, with role markers around each message. Tools come first, as in
    most templates. The text of a conversation is a prefix of the text of its next turn: later messages and
    the generation prompt never change earlier text, and an answer plus its end marker is exactly the text of
    the assistant's message that the client sends back.
    """
    head = f"<|tools|>\n{tools_json}{END_MARKER}\n" if tools_json else ""
    body = "".join(f"<|{message.role}|>\n{message.content}{END_MARKER}\n" for message in messages)
    return f"{head}{body}<|assistant|>\n"


class _Pieces:
    """Every token is a whole piece of text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def feed(self, token_id: TokenId) -> str:
        return self._tokenizer.decode(token_id)

    def flush(self) -> str:
        return ""


class _Script:
    """An answer that is given word for word: its constraint, and its detokenizer, so that no piece has to be
    registered.
    """

    def __init__(self, token_ids: Sequence[TokenId], pieces: Sequence[str]) -> None:
        """The last token is the end marker."""
        self._token_ids = token_ids
        self._pieces = dict(zip(token_ids, pieces, strict=False))

    def __call__(self, answer: Sequence[TokenId]) -> Sequence[TokenId]:
        return self._token_ids[len(answer) : len(answer) + 1] or self._token_ids[-1:]

    def feed(self, token_id: TokenId) -> str:
        return self._pieces.get(token_id, "")

    def flush(self) -> str:
        return ""


class StandInLanguage:
    def __init__(self, tokenizer: Tokenizer, *, eos_token_id: TokenId) -> None:
        self._tokenizer = tokenizer
        self._pieces = _Pieces(tokenizer)
        self.longest_token_characters = LONGEST_PIECE_CHARACTERS
        self.eos_token_ids = (eos_token_id,)

    def encode(self, text: str) -> list[TokenId]:
        return self._tokenizer.encode(text)

    def encode_chat(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[Any] | None = None,
        variables: Mapping[str, Any] = NO_VARIABLES,  # noqa: ARG002 - the stand-in template has no variables
    ) -> list[TokenId]:
        plain = [
            ChatMessage(message.role, message.content + _as_json(message.tool_calls)) for message in messages
        ]
        return self._tokenizer.encode(render_chat(plain, tools_json=_as_json(tools)))

    def decode(self, token_ids: Sequence[TokenId]) -> str:
        try:
            return "".join([self._tokenizer.decode(token) for token in token_ids])
        except KeyError as error:
            raise UnknownTokenError(
                f"Token {error} has no known text: token ids of this model are hashes, and only the tokens of answers can be turned back into text."
            ) from error

    def constraints(self, alternatives: Sequence[Alternative], *, count: int) -> Sequence[_Script]:
        text = small_answer(alternatives)
        return [_Script([*self._tokenizer.encode(text), *self.eos_token_ids], PIECES.findall(text))] * count

    def detokenizer(self, prompt: Sequence[TokenId], *, constraint: Constraint | None = None) -> Detokenizer:  # noqa: ARG002 - a piece's text depends on nothing before it
        return constraint if isinstance(constraint, _Script) else self._pieces


def _as_json(value: Sequence[Any] | None) -> str:
    return msgspec.json.encode(value).decode() if value else ""
