"""Other names for models: which target a request gets, and how its body changes."""

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.base.errors import BadRequestError
from epp.base.types import ApiKind, InferenceRequest
from epp.request.parse import parse_request
from epp.request.rewriting import Rewrite, Rewrites, RewriteTarget, with_model

SPLIT = Rewrites([Rewrite((RewriteTarget("llama", 90), RewriteTarget("canary", 10)), ("gpt",))])


def chat_of_turns(*texts: str, model: str = "gpt") -> InferenceRequest:
    roles = ("system", "user", "assistant")
    turns = [{"role": roles[0] if n == 0 else roles[2 - n % 2], "content": t} for n, t in enumerate(texts)]
    return parse_request("/v1/chat/completions", json.dumps({"model": model, "messages": turns}).encode())


def target(rewrites: Rewrites, request: InferenceRequest, *, session: str = "", request_id: str = "r") -> str:
    return rewrites.target(request, session=session, request_id=request_id)


def test_an_alias_names_its_target_and_other_models_stay() -> None:
    rewrites = Rewrites([Rewrite((RewriteTarget("llama"),), ("gpt", "old"))])
    assert [target(rewrites, chat_of_turns("a", "b", model=m)) for m in ("gpt", "old", "llama")] == [
        "llama"
    ] * 3
    assert target(rewrites, chat_of_turns("a", model="mistral")) == "mistral"
    assert list(rewrites.aliases) == ["gpt", "old"]
    assert not Rewrites()


def test_a_rule_without_models_takes_all_other_names() -> None:
    rewrites = Rewrites(
        [
            Rewrite((RewriteTarget("fallback"),), ()),
            Rewrite((RewriteTarget("first"),), ("gpt",)),
            Rewrite((RewriteTarget("second"),), ("gpt",)),
            Rewrite((RewriteTarget("never"),), ()),
        ]
    )
    assert target(rewrites, chat_of_turns("a")) == "first"
    assert target(rewrites, chat_of_turns("a", model="whatever")) == "fallback"


def test_weights_are_kept_within_sampling_error_under_one_system_prompt() -> None:
    system = "You are a helpful assistant. " * 200
    seen = Counter(target(SPLIT, chat_of_turns(system, f"question {n}")) for n in range(5000))
    # Four standard deviations of a binomial draw: sqrt(5000 * .1 * .9) is 21.
    assert abs(seen["canary"] - 500) < 85
    assert seen.keys() == {"llama", "canary"}


def test_all_turns_of_a_conversation_have_one_target() -> None:
    for n in range(200):
        turns = [f"system {n % 3}", f"question {n}", "answer", "more", "answer", "still more"]
        assert len({target(SPLIT, chat_of_turns(*turns[:size])) for size in (2, 4, 6)}) == 1


def test_the_session_decides_first_then_the_prompt_and_then_the_request_id() -> None:
    assert len({target(SPLIT, chat_of_turns("s", f"q{n}"), session="alice") for n in range(50)}) == 1
    bare = InferenceRequest(kind=ApiKind.OTHER, model="gpt")
    seen = Counter(target(SPLIT, bare, request_id=str(n)) for n in range(2000))
    assert abs(seen["canary"] - 200) < 54


def test_a_larger_share_moves_no_conversation_back() -> None:
    more = Rewrites([Rewrite((RewriteTarget("llama", 80), RewriteTarget("canary", 20)), ("gpt",))])
    for n in range(500):
        request = chat_of_turns("s", f"question {n}")
        if target(SPLIT, request) == "canary":
            assert target(more, request) == "canary"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b'{"model": "gpt", "prompt": "gpt"}', b'{"model": "ll\\"ama", "prompt": "gpt"}'),
        (b'\xef\xbb\xbf { "prompt":1.50, "x":{"model":"gpt"},\n"model" :  "g\\u0070t" }',
         b'\xef\xbb\xbf { "prompt":1.50, "x":{"model":"gpt"},\n"model" :  "ll\\"ama" }'),
        (b'{"model":"other","model":"gpt"}', b'{"model":"other","model":"ll\\"ama"}'),
    ],
)  # fmt: skip
def test_only_the_bytes_of_the_name_change(before: bytes, after: bytes) -> None:
    assert with_model(before, model='ll"ama') == after
    assert with_model(memoryview(before), model='ll"ama') == after


def test_a_body_without_a_name_is_written_again_with_its_values_unchanged() -> None:
    body = b'{"model": null, "n": 1.50, "deep": [ 1 , {"a": "\\u00e9"} ]}'
    changed = with_model(body, model="llama")
    assert json.loads(changed) == {**json.loads(body), "model": "llama"}
    assert b"1.50" in changed
    assert b'[ 1 , {"a": "\\u00e9"} ]' in changed


@pytest.mark.parametrize(
    "keys",
    [
        b'"model":"a","mod\\u0065l":"gpt"',
        b'"mod\\u0065l":"a","model":"gpt"',
        b'"model":"gpt","\\u006D\\u006fdel":"gpt"',
        b'"\\u006d\\u006f\\u0064\\u0065\\u006c":"gpt"',
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/rerank", "/tokenize", ""])
def test_no_second_spelling_of_the_key_evades_a_rule(keys: bytes, path: str) -> None:
    body = b'{%b, "prompt": "a"}' % keys
    assert parse_request(path, body).model == "gpt"
    assert json.loads(with_model(memoryview(body), model="llama"))["model"] == "llama"


@pytest.mark.parametrize("more", [b'"x":NaN', b'"x":[' + b"[]," * 300_000 + b"0]"], ids=["NaN", "costly"])
def test_a_body_that_is_not_read_is_refused_only_if_it_has_no_name(more: bytes) -> None:
    body = b'{"model":"gpt","mod\\u0065l":%b,%b}'
    asked = body % (b'"gpt"', more)
    assert parse_request("/v1/completions", asked).model == "gpt"
    assert with_model(asked, model="llama") == body % (b'"llama"', more)
    with pytest.raises(BadRequestError, match="no `model` to replace"):
        with_model(body % (b"null", more), model="llama")


JSON = st.recursive(
    st.none() | st.integers() | st.text(),
    lambda c: st.lists(c) | st.dictionaries(st.text(), c),
    max_leaves=8,
)


@pytest.mark.slow
@given(
    fields=st.dictionaries(st.text(), JSON, max_size=5),
    model=st.text(min_size=1),
    after=st.text(),
    ascii_only=st.booleans(),
)
def test_nothing_but_the_model_changes(
    fields: dict[str, object], model: str, after: str, *, ascii_only: bool
) -> None:
    body = json.dumps({**fields, "model": model}, ensure_ascii=ascii_only).encode("utf-8", "replace")
    read = json.loads(body)
    changed = with_model(body, model=after)
    assert json.loads(changed) == {**read, "model": after}
