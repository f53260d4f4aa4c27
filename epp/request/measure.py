"""What of a prompt tells its tokens: its bytes, how many of them continue a letter beyond ASCII, and what is only named by hash.

A tokenizer makes a token of about four letters of English and of about one of Chinese, so bytes alone mislead where both occur.
Long prompts are sampled, a few thousand bytes for any length: this runs on every request.
"""

from __future__ import annotations

from epp.request.canonical import OPAQUE
from epp.types import InferenceRequest, PromptSize

_CONTINUATION = bytes(range(0x80, 0xC0))
_SAMPLE_BYTES = 2048


def prompt_size(request: InferenceRequest, *, body_bytes: int = 0) -> PromptSize:
    """Of all of the request's prompts; a body that could not be read counts by its size."""
    prompt = request.prompt
    size = len(prompt)
    total = size + request.more_prompt_bytes
    if not total:
        return PromptSize(text_bytes=body_bytes)
    if request.token_ids or not size:
        return PromptSize(text_bytes=total)
    # A stride that neither letters of two nor of three bytes can keep in step with.
    sample = prompt[:: 6 * (size // (6 * _SAMPLE_BYTES)) + 1]
    continued = len(sample) - len(sample.translate(None, _CONTINUATION))
    opaque = max(1, prompt.count(OPAQUE)) if request.opaque else 0
    return PromptSize(total, continued * total / len(sample), opaque)
