"""Any bytes as a body give a job that the engine can take, or one typed error for the client."""

import json
import random
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from model_server.core.request import Adapter, TokenId
from model_server.server.errors import ApiError
from model_server.server.models import ServedModels
from model_server.server.openai import Job, RequestReader
from model_server.server.sampling import SamplingReader
from model_server.text.standin import StandInLanguage
from model_server.text.tokenizer import Tokenizer

MAX_LEN = 200
READER = RequestReader(
    models=ServedModels(names=["m"], root="m", adapters=[Adapter("a")]),
    language=StandInLanguage(Tokenizer(), eos_token_id=TokenId(0)),
    sampling=SamplingReader(made_up=True, rng=random.Random(1)),
    max_len_tokens=MAX_LEN,
)

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
message = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "system", "tool"]) | scalars, "content": st.text(max_size=30) | values},
)
body = st.fixed_dictionaries(
    {},
    optional={
        "model": st.sampled_from(["m", "a", "x"]) | values,
        "prompt": st.text(max_size=40)
        | st.lists(st.integers(-1, 2**33), max_size=5)
        | st.lists(st.text(max_size=9))
        | values,
        "messages": st.lists(message, max_size=3) | values,
        "max_tokens": st.integers(-1, 300) | values,
        "max_completion_tokens": st.integers(1, 50) | values,
        "n": st.sampled_from([1, 2]) | values,
        "stream": st.booleans() | values,
        "stream_options": st.fixed_dictionaries({"include_usage": st.booleans()}) | values,
        "cache_salt": st.text(max_size=5) | values,
        "tools": st.lists(st.dictionaries(st.text(max_size=4), scalars, max_size=2), max_size=2) | values,
        "seed": values,
    },
)


def mutated(data: st.DataObject, raw: bytes) -> bytes:
    """Replace, remove or repeat some bytes of a body."""
    at = data.draw(st.integers(0, len(raw)))
    end = data.draw(st.integers(at, min(len(raw), at + 4)))
    return raw[:at] + data.draw(st.binary(max_size=4)) + raw[end:]


def read_or_error(read: Callable[[bytes], Job], raw: bytes) -> Job | ApiError:
    try:
        return read(raw)
    except ApiError as error:
        return error


def check_body(raw: bytes) -> None:
    for read in (READER.completion, READER.chat):
        job = read_or_error(read, raw)
        if isinstance(job, ApiError):
            assert job.status in {400, 404}
            json.dumps(job.body()).encode()
            continue
        assert job.prompts
        assert all(0 < len(prompt) < MAX_LEN for prompt in job.prompts)
        assert all(0 <= token < 2**32 for prompt in job.prompts for token in prompt)
        assert 1 <= job.max_tokens < MAX_LEN
        job.cache_salt.encode()


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(content=body)
def test_any_json_is_a_job_or_a_typed_error(content: dict[str, Any]) -> None:
    check_body(json.dumps(content).encode())


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(content=body, data=st.data())
def test_damaged_bytes_are_a_job_or_a_typed_error(content: dict[str, Any], data: st.DataObject) -> None:
    check_body(mutated(data, json.dumps(content, ensure_ascii=False).encode("utf-8", "replace")))


@given(raw=st.binary(max_size=60))
def test_any_bytes_are_a_job_or_a_typed_error(raw: bytes) -> None:
    check_body(raw)
