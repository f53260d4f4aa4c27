"""Fields of a request that change how the server renders its prompt, such as arguments for the chat template.

They are not part of the canonical prompt, so two requests with the same chunks may have different fields.
vLLM defines their meaning. Pure. Caller: `mapping`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from epp.request.bounded_json import decode

_UNSET: Final = (None, "auto")
_OWN_MEANING: Final = frozenset(
    {"chat_template", "tokenize", "messages", "conversation", "tools", "padding", "truncation", "max_length"}
    | {"return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"}
)
"""As template arguments, these have a meaning that the server itself defines, or are a reason for the server
to refuse the request.
"""
_AT_THE_END: Final = frozenset({"add_generation_prompt", "continue_final_message"})
"""These change only what follows the last text, which no chunk holds. The request's fields of these names
count, with a default.
"""


class ShapingError(Exception):
    """It is not known how the server renders the prompt."""


@dataclass(frozen=True, slots=True)
class Shaping:
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """The arguments for the template."""
    special_tokens: bool | None = None
    """Whether the tokenizer adds its own tokens around the text. None: the usual default."""


_NONE: Final = Shaping()


def read_shaping(sent: bytes) -> Shaping:
    """The fields of `InferenceRequest.shaping`. Raises ShapingError."""
    if not sent:
        return _NONE
    try:
        fields = decode(sent)
    except ValueError as error:
        raise ShapingError(f"the request has fields that cannot be read ({error})") from error
    if fields.get("chat_template") is not None:
        raise ShapingError("the request has a chat template of its own")
    if fields.get("truncate_prompt_tokens") is not None:
        raise ShapingError("the request has its prompt truncated")
    arguments = fields.get("chat_template_kwargs") or {}
    if not isinstance(arguments, dict) or arguments.keys() & _OWN_MEANING:
        raise ShapingError("the request has template arguments that only the server sets")
    arguments = {name: value for name, value in arguments.items() if name not in _AT_THE_END}
    effort = fields.get("reasoning_effort")
    if effort is not None and "enable_thinking" not in arguments:
        arguments["enable_thinking"] = effort != "none"
    own = {"documents": fields.get("documents"), "reasoning_effort": effort}
    arguments |= {name: value for name, value in own.items() if value not in _UNSET}
    special = fields.get("add_special_tokens")
    return Shaping(arguments, special if isinstance(special, bool) else None)
