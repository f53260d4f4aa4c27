"""The prompt of the next turn, predicted from an answer."""

from __future__ import annotations

import pytest

from epp.base.types import ApiKind, InferenceRequest
from epp.request.canonical import next_turn_prompt


@pytest.mark.parametrize("kind", [ApiKind.CHAT, ApiKind.MESSAGES])
def test_an_answer_becomes_the_assistants_message(kind: ApiKind) -> None:
    request = InferenceRequest(kind=kind, prompt=b"\xffuser\xfehi")
    assert next_turn_prompt(request, "hé") == b"\xffuser\xfehi\xffassistant\xfeh\xc3\xa9"


def test_the_next_completion_begins_with_prompt_and_answer() -> None:
    assert next_turn_prompt(InferenceRequest(kind=ApiKind.COMPLETIONS, prompt=b"a "), "b") == b"a b"


@pytest.mark.parametrize(
    "request_",
    [
        InferenceRequest(kind=ApiKind.COMPLETIONS, prompt=b"\0\0\0\1", token_ids=True),
        InferenceRequest(kind=ApiKind.RESPONSES, prompt=b"a"),
        InferenceRequest(kind=ApiKind.EMBEDDINGS, prompt=b"a"),
        InferenceRequest(kind=ApiKind.OTHER),
    ],
)
def test_for_other_requests_the_next_turn_cannot_be_predicted(request_: InferenceRequest) -> None:
    assert next_turn_prompt(request_, "b") is None


def test_an_answer_with_a_lone_surrogate_is_still_bytes() -> None:
    assert next_turn_prompt(InferenceRequest(kind=ApiKind.COMPLETIONS), "a\ud800") == b"a?"
