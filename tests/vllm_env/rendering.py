"""Prints how vLLM renders bodies: a JSON list of [path, body] comes in, and a list of texts goes out on the
last line. It runs inside the vLLM environment, not in ours. The template is written here: like those of most
models that think, it leaves out thoughts before the user's last message.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

TEMPLATE = """
{%- for each in documents or [] %}<doc>{{ each | tojson }}{% endfor %}
{%- for each in tools or [] %}<tool>{{ each | tojson }}{% endfor %}
{%- set at = namespace(last=-1) %}
{%- for each in messages %}{% if each.role == "user" %}{% set at.last = loop.index0 %}{% endif %}{% endfor %}
{%- for each in messages %}<|{{ each.role }}|>
{%- if each.reasoning and loop.index0 > at.last %}<think>{{ each.reasoning }}</think>{% endif %}
{{- each.content or "" }}
{%- for call in each.tool_calls or [] %}<call>{{ call.function.name }}{{ call.function.arguments | tojson }}
{%- endfor %}
{%- endfor %}"""


def rendered(path: str, body: dict[str, Any]) -> str:
    # The imports stand here, because our own environment imports this folder too.
    import jinja2  # noqa: PLC0415
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest  # noqa: PLC0415
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages  # noqa: PLC0415
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest  # noqa: PLC0415
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest  # noqa: PLC0415
    from vllm.entrypoints.openai.responses.utils import (  # noqa: PLC0415
        construct_input_messages,
        construct_tool_dicts,
    )
    from vllm.renderers import chat_utils  # noqa: PLC0415

    body = {"model": "m", **body}
    chat: Any
    if path.endswith("/messages"):
        asked = AnthropicMessagesRequest.model_validate({"max_tokens": 1, **body})
        chat = AnthropicServingMessages.to_chat_completion_request(asked)
    elif path.endswith("/responses"):
        items = ResponsesRequest.model_validate(body)
        messages = construct_input_messages(
            request_instructions=items.instructions, request_input=items.input
        )
        chat = SimpleNamespace(messages=messages, documents=None, chat_template=None)
        tools = construct_tool_dicts(items.tools, items.tool_choice)
    else:
        chat = ChatCompletionRequest.model_validate(body)
    if not path.endswith("/responses"):
        tools = [tool.model_dump() for tool in chat.tools or ()]
    model: Any = SimpleNamespace(
        is_multimodal_model=False,
        multimodal_config=SimpleNamespace(interleave_mm_strings=True, media_io_kwargs=None),
        enable_prompt_embeds=False,
        hf_config=SimpleNamespace(),
        allowed_local_media_path="",
        allowed_media_domains=None,
    )
    # A picture stands in the prompt by what the cache knows it by; nothing is fetched.
    tracker, parser = chat_utils.MultiModalItemTracker, chat_utils.MultiModalContentParser
    tracker.add = lambda _, kind, item: f"<{kind} {item[1] or item[0]}>"
    tracker.resolve_items = lambda _: (None, None)
    tracker.video_processor_name = None
    fetching = SimpleNamespace(fetch_image=str, fetch_audio=str, fetch_video=lambda video_url, **_: video_url)
    parser._connector = fetching  # noqa: SLF001
    conversation = chat_utils.parse_chat_messages(chat.messages, model, "string")[0]
    templates = jinja2.Environment()
    templates.filters["tojson"] = partial(json.dumps, ensure_ascii=False)  # as transformers does
    template = templates.from_string(chat.chat_template or TEMPLATE)
    return str(template.render(messages=conversation, tools=tools, documents=chat.documents))


if __name__ == "__main__":
    print(json.dumps([rendered(path, body) for path, body in json.load(sys.stdin)]))
