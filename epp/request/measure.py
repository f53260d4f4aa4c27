"""Measures the properties of a prompt that predict its tokens: its bytes, the bytes that continue a letter
beyond ASCII, and the parts that are only named by a hash.

A tokenizer makes a token of about four letters of English and of about one of Chinese, so bytes alone mislead
where both occur. Long prompts are sampled, a few thousand bytes for any length: this runs on every request.
"""

from __future__ import annotations

from epp.request.canonical import OPAQUE
from epp.request.jsontext import continued
from epp.types import InferenceRequest, PromptSize

_SAMPLE_BYTES = 2048
_MOST_UNREAD_BYTES = 256 * 1024
"""Bound for an unread body, which may have any size and is seldom all text. If more counted, its server would
get nothing else for a minute."""
_MEDIA_BYTES = 4096
"""For a recording or another upload that is no JSON. Its size does not show how many tokens it makes."""


def prompt_size(request: InferenceRequest, *, body_bytes: int = 0) -> PromptSize:
    """The size of all prompts of a request. An unread body counts by its size, up to a bound."""
    prompt = request.prompt
    size = len(prompt)
    total = size + request.more_prompt_bytes
    if not total:
        if request.opaque:
            return PromptSize(text_bytes=min(body_bytes, _MEDIA_BYTES), opaque=1)
        return PromptSize(text_bytes=min(body_bytes, _MOST_UNREAD_BYTES))
    if request.token_ids or not size:
        return PromptSize(text_bytes=total)
    # The stride is a multiple of six plus one, so the samples cannot stay in step with letters of two or
    # three bytes.
    seen, found = continued(prompt, 6 * (size // (6 * _SAMPLE_BYTES)) + 1)
    opaque = max(1, prompt.count(OPAQUE)) if request.opaque else 0
    return PromptSize(total, found * total / seen, opaque)
