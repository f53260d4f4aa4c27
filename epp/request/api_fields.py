"""The fields of bodies that routing reads. Most of them stay the JSON that was sent.

A field that is decoded here costs the decoding of its JSON each time it occurs. A field that stays `Raw`
costs only one pass over its bytes. Called by `parse`.
"""

from operator import attrgetter
from typing import Final

import msgspec
from msgspec import Raw, Struct

from epp.request.jsontext import NO_RAW


class ChatMessage(Struct, gc=False):
    role: Raw
    content: Raw = NO_RAW
    name: Raw = NO_RAW
    tool_call_id: Raw = NO_RAW
    tool_calls: Raw = NO_RAW
    function_call: Raw = NO_RAW
    reasoning: Raw = NO_RAW
    reasoning_content: Raw = NO_RAW


class Fields(Struct, gc=False):
    """The fields of all APIs. An API reads its own, and no other API has a field of this name and another
    type.
    """

    model: Raw = NO_RAW
    cache_salt: Raw = NO_RAW
    stream: bool | None = None
    messages: list[ChatMessage] | None = None
    system: Raw = NO_RAW
    tools: Raw = NO_RAW
    max_tokens: int | None = None

    # Chats, and completions.
    max_completion_tokens: int | None = None
    documents: Raw = NO_RAW
    chat_template: Raw = NO_RAW
    chat_template_kwargs: Raw = NO_RAW
    reasoning_effort: Raw = NO_RAW
    add_special_tokens: Raw = NO_RAW
    truncate_prompt_tokens: Raw = NO_RAW
    prompt: Raw = NO_RAW
    prompt_embeds: Raw = NO_RAW

    # Responses, and embeddings.
    input: Raw = NO_RAW
    instructions: Raw = NO_RAW
    previous_response_id: Raw = NO_RAW
    conversation: Raw = NO_RAW
    store: bool | None = None
    max_output_tokens: int | None = None
    encoding_format: Raw = NO_RAW
    dimensions: Raw = NO_RAW

    # The servers' own APIs for a text or token ids: vLLM's, SGLang's and TGI's.
    text: Raw = NO_RAW
    inputs: Raw = NO_RAW
    input_ids: Raw = NO_RAW
    token_ids: Raw = NO_RAW


class Named(Struct, gc=False):
    """An object that is read for its id only."""

    id: Raw = NO_RAW


BESIDE_PROMPT: Final = attrgetter(
    "tools",
    "chat_template",
    "chat_template_kwargs",
    "documents",
    "reasoning_effort",
    "add_special_tokens",
    "truncate_prompt_tokens",
)
"""The tools, and the fields that change how the server renders a chat, besides changes at its end. The last
two do the same for a completion.
"""

# Not strict: model servers take 16.0 and "16" as 16, and 1 as true; a string field still takes only strings.
DECODE: Final = msgspec.json.Decoder(Fields, strict=False).decode
DECODE_NAMED: Final = msgspec.json.Decoder(Named).decode
