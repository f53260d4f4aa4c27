"""The chain of a prompt, and the picker's estimates of its size without a tokenizer."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.base.types import ApiKind, InferenceRequest, Media, PromptSize
from epp.config.policy import Chunks
from epp.picker.server_caches import Roots, prompt_size
from epp.request.parse import parse_request

SMALL = Chunks(size_bytes=4, later_size_bytes=10, later_from_bytes=8)


def test_the_root_is_stable_across_releases() -> None:
    # Replicas of different builds share hashes. If this value changes, the version of the scheme has to
    # change too.
    assert Roots(Chunks(), secret=b"k").seed(model="m", cache_salt="s") == 0x98B48AA44E21B44D


def test_roots_differ_by_every_part_and_by_the_end_of_each_part() -> None:
    parts = [("ab", ""), ("a", "b"), ("", "ab"), ("", ""), ("a\x00", "b"), ("a", "\x00b"), ("\udcff", "")]
    schedules = [Chunks(), SMALL, Chunks(4, 8, 10), Chunks(8, 4, 10)]
    roots = [
        Roots(schedule, secret=secret).seed(model=model, cache_salt=salt)
        for schedule, secret, (model, salt) in itertools.product(schedules, (b"", b"a", b"b"), parts)
    ]
    assert len(set(roots)) == len(roots)


def request(prompt: bytes, *, more: int = 0, token_ids: bool = False) -> InferenceRequest:
    return InferenceRequest(kind=ApiKind.CHAT, prompt=prompt, more_prompt_bytes=more, token_ids=token_ids)


@given(st.text(max_size=600))
def test_a_short_prompt_is_measured_exactly(text: str) -> None:
    prompt = text.encode("utf-8", "ignore")
    letters = len(prompt.decode("utf-8"))
    assert prompt_size(request(prompt)) == PromptSize(len(prompt), len(prompt) - letters)


@pytest.mark.parametrize(
    ("letters", "share"), [("a", 0.0), ("é", 1 / 2), ("漢", 2 / 3), ("😀", 3 / 4), ("abc漢字", 4 / 9)]
)
@pytest.mark.parametrize("size", [5000, 40_000, 400_000])
def test_a_long_prompt_is_measured_by_a_sample_within_3_percent(
    letters: str, share: float, size: int
) -> None:
    prompt = (letters * size).encode()[:size]
    found = prompt_size(request(prompt))
    assert found.text_bytes == size
    assert found.continuation_bytes / size == pytest.approx(share, abs=0.03)


def test_the_prompts_of_a_batch_are_summed_and_assumed_to_be_alike() -> None:
    assert prompt_size(request("é".encode() * 50, more=300)) == PromptSize(400, 200.0)


def test_token_ids_are_measured_by_their_bytes_alone() -> None:
    assert prompt_size(request(b"\x80\x00\x00\x00" * 5, token_ids=True)) == PromptSize(20)


def test_a_large_unread_body_counts_at_most_as_a_long_prompt() -> None:
    assert prompt_size(InferenceRequest(kind=ApiKind.OTHER), body_bytes=32_000_000) == PromptSize(256 * 1024)


@pytest.mark.parametrize(("size_bytes", "expected"), [(2_000_000, 3126), (32_000_000, 16_384)])
def test_an_upload_counts_as_a_recording_of_its_size(size_bytes: int, expected: int) -> None:
    form = b"--x\r\nContent-Disposition: form-data; name=file\r\n\r\n" + bytes(size_bytes)
    uploaded = parse_request("/v1/audio/transcriptions", form)
    size = prompt_size(uploaded, body_bytes=len(form))
    assert size == PromptSize(4096, media=Media(sound=expected))
    asked = parse_request("/v1/rerank", b'{"model":"m","query":"foxes"}')
    assert prompt_size(asked, body_bytes=9000) == PromptSize(9000)
