"""Every field of vLLM's requests is read, refused or known to change nothing. The fields are recorded; if
vLLM is built, the last test asks vLLM again.
"""

import json
from collections.abc import Mapping
from typing import Any

import pytest

from model_server.server.errors import ApiError
from model_server.server.front_ends import (
    NEUTRAL_IN_EMBEDDINGS,
    NEUTRAL_IN_MESSAGES,
    EmbeddingsBody,
    MessagesBody,
)
from model_server.server.openai import ChatBody, CompletionBody, read_body
from model_server.server.refused import NEUTRAL, NEUTRAL_IN_CHAT, NO_EFFECT, check
from model_server.server.responses import NEUTRAL_IN_RESPONSES, ResponsesBody
from tests.contract.recordings import read_text
from tests.vllm_env.environment import VllmEnvironment
from tests.vllm_env.recording import read_request_fields

FIELDS: dict[str, dict[str, Any]] = json.loads(read_text("request_fields.json"))
OURS: list[tuple[str, Any, Mapping[str, tuple[object, ...]]]] = [
    ("completions", CompletionBody, NEUTRAL),
    ("chat", ChatBody, NEUTRAL_IN_CHAT),
    ("messages", MessagesBody, NEUTRAL_IN_MESSAGES),
    ("responses", ResponsesBody, NEUTRAL_IN_RESPONSES),
    ("embeddings", EmbeddingsBody, NEUTRAL_IN_EMBEDDINGS),
]
SMALLEST = {"prompt": "x", "messages": [], "input": "x", "max_tokens": 1}
OTHER: dict[str, object] = {
    "tool_choice": "required",
    "skip_special_tokens": False,
}
"""Values that change the answer. All other fields get a text."""


@pytest.mark.parametrize(("api", "body", "neutral"), OURS)
def test_every_field_of_vllm_is_read_refused_or_without_effect(
    api: str, body: Any, neutral: Mapping[str, tuple[object, ...]]
) -> None:
    read = set(body.__struct_fields__) - neutral.keys()
    unknown = FIELDS[api].keys() - read - neutral.keys() - NO_EFFECT
    assert not unknown, "put these fields into one of the lists of model_server/server/refused.py"
    assert not read & NO_EFFECT


@pytest.mark.parametrize(("api", "body", "neutral"), OURS)
def test_vllms_defaults_are_never_refused(
    api: str, body: Any, neutral: Mapping[str, tuple[object, ...]]
) -> None:
    defaults = {name: FIELDS[api].get(name) for name in neutral}
    check(read_body(json.dumps({**SMALLEST, **defaults}).encode(), body), neutral)


@pytest.mark.parametrize(("api", "body", "neutral"), OURS)
def test_each_other_value_of_a_refused_field_is_named_in_400(
    api: str, body: Any, neutral: Mapping[str, tuple[object, ...]]
) -> None:
    for name in neutral:
        smallest = {field: value for field, value in SMALLEST.items() if field not in neutral}
        sent = {**smallest, name: OTHER.get(name, "something else")}
        with pytest.raises(ApiError, match=f"^{name} is not supported") as refused:
            check(read_body(json.dumps(sent).encode(), body), neutral)
        assert (refused.value.status, refused.value.param) == (400, name)


@pytest.mark.vllm
def test_the_recorded_fields_are_those_of_this_vllm(vllm_environment: VllmEnvironment) -> None:
    assert read_request_fields(vllm_environment) == FIELDS
