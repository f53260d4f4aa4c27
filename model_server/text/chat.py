"""A stand-in for a model's chat template: role markers around each message.

The rendered conversation is a prefix of its next turn's. Nothing that comes later (the number of messages,
the generation prompt) changes earlier text, and an answer plus its end marker is exactly the rendered
assistant's message that the client sends back.
"""

from __future__ import annotations

from collections.abc import Sequence

from model_server.text.answers import END_MARKER
from model_server.text.language import ChatMessage


def render_chat(messages: Sequence[ChatMessage], *, tools_json: str = "") -> str:
    """Return the prompt of a conversation. Tools come first, as in most templates."""
    head = f"<|tools|>\n{tools_json}{END_MARKER}\n" if tools_json else ""
    body = "".join(f"<|{message.role}|>\n{message.content}{END_MARKER}\n" for message in messages)
    return f"{head}{body}<|assistant|>\n"
