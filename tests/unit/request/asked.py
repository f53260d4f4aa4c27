"""Requests by their paths and bodies, as the picker reads them."""

import json
from typing import Any

from epp.base.types import InferenceRequest
from epp.request.parse import parse_request

CHAT = "/v1/chat/completions"


def parse(path: str, **body: Any) -> InferenceRequest:
    """Read a request to the model `base`."""
    return parse_request(path, json.dumps({"model": "base", **body}).encode())


def chat_prompt(content: Any, **more: Any) -> bytes:
    """Return the canonical prompt of a chat with one message."""
    return parse(CHAT, messages=[{"role": "user", "content": content, **more}]).prompt
