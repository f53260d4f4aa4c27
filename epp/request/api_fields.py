"""The fields of each API's body that routing reads. Most of them stay the JSON that was sent.

A field that is decoded here costs the decoding of its JSON each time it occurs. A field that stays `Raw`
costs only one pass over its bytes. Called by `parse`.
"""

from operator import attrgetter
from typing import Final, TypeVar

import msgspec
from msgspec import Raw, Struct

from epp.request.jsontext import NO_RAW


class AnyBody(Struct, gc=False):
    model: Raw = NO_RAW
    cache_salt: Raw = NO_RAW
    stream: bool | None = None


class ChatMessage(Struct, gc=False):
    role: Raw
    content: Raw = NO_RAW
    name: Raw = NO_RAW
    tool_call_id: Raw = NO_RAW
    tool_calls: Raw = NO_RAW
    function_call: Raw = NO_RAW
    reasoning: Raw = NO_RAW
    reasoning_content: Raw = NO_RAW


class Chat(AnyBody, gc=False):
    messages: list[ChatMessage] | None = None
    tools: Raw = NO_RAW
    chat_template: Raw = NO_RAW
    chat_template_kwargs: Raw = NO_RAW
    documents: Raw = NO_RAW
    reasoning_effort: Raw = NO_RAW
    add_special_tokens: Raw = NO_RAW
    truncate_prompt_tokens: Raw = NO_RAW
    max_tokens: int | None = None
    max_completion_tokens: int | None = None


class Completions(AnyBody, gc=False):
    prompt: Raw = NO_RAW
    prompt_embeds: Raw = NO_RAW
    add_special_tokens: Raw = NO_RAW
    truncate_prompt_tokens: Raw = NO_RAW
    max_tokens: int | None = None


class Embeddings(AnyBody, gc=False):
    input: Raw = NO_RAW
    messages: list[ChatMessage] | None = None


class Responses(AnyBody, gc=False):
    input: Raw = NO_RAW
    instructions: Raw = NO_RAW
    tools: Raw = NO_RAW
    previous_response_id: Raw = NO_RAW
    conversation: Raw = NO_RAW
    store: bool | None = None
    max_output_tokens: int | None = None


class Messages(AnyBody, gc=False):
    messages: list[ChatMessage] | None = None
    system: Raw = NO_RAW
    tools: Raw = NO_RAW
    max_tokens: int | None = None


class Generate(AnyBody, gc=False):
    """The servers' own APIs for a text or token ids: vLLM's, SGLang's and TGI's."""

    prompt: Raw = NO_RAW
    text: Raw = NO_RAW
    inputs: Raw = NO_RAW
    input_ids: Raw = NO_RAW
    token_ids: Raw = NO_RAW


class NamedObject(Struct, gc=False):
    id: Raw = NO_RAW


class Other(Struct, gc=False):
    model: Raw = NO_RAW
    input_file_id: Raw = NO_RAW


class ApiFields(Struct, gc=False):
    """The fields that show which API a body is for if there is no path."""

    messages: Raw = NO_RAW
    system: Raw = NO_RAW
    prompt: Raw = NO_RAW
    prompt_embeds: Raw = NO_RAW
    input: Raw = NO_RAW
    encoding_format: Raw = NO_RAW
    dimensions: Raw = NO_RAW
    previous_response_id: Raw = NO_RAW


_B = TypeVar("_B", bound=AnyBody)


def _decoder(body: type[_B]) -> msgspec.json.Decoder[_B]:
    # Not strict: model servers take 16.0 and "16" as 16, and 1 as true;
    # a string field still takes only strings.
    return msgspec.json.Decoder(body, strict=False)


SHAPING_COMPLETIONS: Final = attrgetter("add_special_tokens", "truncate_prompt_tokens")
"""Fields that change how the server renders the prompt, besides changes at its end."""
_SHAPING: Final = (
    "chat_template",
    "chat_template_kwargs",
    "documents",
    "reasoning_effort",
    "add_special_tokens",
    "truncate_prompt_tokens",
)
SHAPING_CHAT: Final = attrgetter(*_SHAPING)
BESIDE_MESSAGES: Final = attrgetter(*_SHAPING, "tools")

DECODE_CHAT: Final = _decoder(Chat)
DECODE_COMPLETIONS: Final = _decoder(Completions)
DECODE_EMBEDDINGS: Final = _decoder(Embeddings)
DECODE_GENERATE: Final = _decoder(Generate)
DECODE_RESPONSES: Final = _decoder(Responses)
DECODE_MESSAGES: Final = _decoder(Messages)
DECODE_API_FIELDS: Final = msgspec.json.Decoder(ApiFields)
DECODE_NAMED: Final = msgspec.json.Decoder(NamedObject)
DECODE_OTHER: Final = msgspec.json.Decoder(Other)
