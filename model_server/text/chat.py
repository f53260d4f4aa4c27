"""A stand-in for a model's chat template: role markers around each message.

The rendering of a conversation is a prefix of its next turn's: nothing that comes later (the number of
messages, the generation prompt) changes what is written before it, and an answer plus its end marker is
exactly how the assistant's message is rendered when the client sends it back.
"""

from __future__ import annotations

from collections.abc import Sequence

from model_server.text.answers import END_MARKER
from model_server.text.language import ChatMessage


def render_chat(messages: Sequence[ChatMessage], *, tools_json: str = "") -> str:
    """The prompt of a conversation; tools come first, as in most templates."""
    head = f"<|tools|>\n{tools_json}{END_MARKER}\n" if tools_json else ""
    body = "".join(f"<|{message.role}|>\n{message.content}{END_MARKER}\n" for message in messages)
    return f"{head}{body}<|assistant|>\n"
