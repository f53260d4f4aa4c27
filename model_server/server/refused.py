"""The fields of vLLM's requests that this server does not do.

A field that would change an answer is refused unless its value changes nothing (`NEUTRAL`). Fields that
change no answer of this server are in `NO_EFFECT`. All other fields of vLLM's request classes are read:
`tests/contract/test_request_fields.py` compares these lists with the classes. Caller: the request reader.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from model_server.server.errors import ApiError
from model_server.server.prompts import ABSENT, option
from model_server.server.sampling import SamplingBody

NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "add_special_tokens": (True,),
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "include_reasoning": (True,),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "logprob_token_ids": ([],),
    "modalities": (["text"],),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "reasoning_effort": (),
    "repetition_detection": (),
    "return_mm_kwargs": (False,),
    "return_prompt_text": (False,),
    "return_token_ids": (False,),
    "return_token_offsets": (False,),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "stream_interval": (),
    "suffix": ("",),
    "thinking_token_budget": (),
    "tool_choice": ("none", "auto"),
    "truncation_side": ("left",),
    "use_beam_search": (False,),
    "watermarking": (False,),
    "web_search_options": (),
}
"""The values, besides null, that change nothing."""
NEUTRAL_IN_CHAT: Mapping[str, tuple[object, ...]] = {
    **{name: values for name, values in NEUTRAL.items() if name != "tool_choice"},
    "add_special_tokens": (False,),  # the template writes them
}

NO_EFFECT = frozenset(
    {
        "ec_transfer_params",  # where caches come from
        "kv_transfer_params",
        "include",  # nothing of what it names is known
        "media_io_kwargs",  # of a picture only the size counts
        "metadata",
        "mm_payload",
        "mm_processor_kwargs",
        "parallel_tool_calls",  # calls are not parsed
        "priority",  # the order of requests
        "prompt_cache_key",  # who belongs together
        "request_id",
        "routed_experts_prompt_start",  # experts are never reported
        "service_tier",
        "session_id",
        "spaces_between_special_tokens",  # special tokens are never shown
        "user",
        "vllm_xargs",  # for vLLM's own plug-ins
    }
)


if TYPE_CHECKING:
    RefusedBody = SamplingBody
else:
    RefusedBody = msgspec.defstruct(
        "RefusedBody", [(name, msgspec.Raw, ABSENT) for name in NEUTRAL], bases=(SamplingBody,), kw_only=True
    )


def check(body: object, neutral: Mapping[str, tuple[object, ...]]) -> None:
    """Raise ApiError if a field would change the answer."""
    for name, values in neutral.items():
        value = option(getattr(body, name), Any, param=name)
        if value is not None and value not in values:
            other = f", or write {msgspec.json.encode(values[0]).decode()}" if values else ""
            raise ApiError(f"{name} is not supported by this server; leave it out{other}.", param=name)
