"""A stand-in for a model's chat template, which puts role markers around each message. The text of a
conversation is a prefix of the text of its next turn. Later parts of a conversation (more messages, the
generation prompt) never change earlier text. An answer plus its end marker is exactly the text of the
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
