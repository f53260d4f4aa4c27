"""Defines the `disaggregation` part of `epp.config.policy`, for prompts that one server computes and another
server answers.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from epp.config.strict import Strict


class Disaggregation(Strict, frozen=True):
    """Prefill and decode on different servers (P/D). It takes effect where endpoints have the role `prefill`
    or `both`.
    """

    min_uncached_tokens: Annotated[int, Meta(ge=0, le=10**9)] = 256
    """If fewer tokens of a prompt than this are uncached on the chosen endpoint, this endpoint computes the
    prompt itself. Otherwise the smaller cost decides."""
    kv_bytes_per_token: Annotated[float, Meta(gt=0, le=10**9)] = 131_072.0
    """Size of the KV cache of one token, in bytes: 2 x layers x KV heads x head size x bytes of one number.
    The default fits an 8B model with 32 layers, 8 KV heads of size 128, and 16-bit numbers."""
    transfer_bytes_per_second: Annotated[float, Meta(gt=0, le=10**15)] = 1e10
    """Rate, in bytes per second, at which KV cache is copied from the prefill endpoint to the endpoint that
    answers. The default is 80 Gbit/s."""
    overhead_seconds: Annotated[float, Meta(ge=0, le=60)] = 0.01
    """Fixed cost of using a prefill endpoint, in seconds, for prompts of any length: one more request, and
    the setup of the transfer."""
