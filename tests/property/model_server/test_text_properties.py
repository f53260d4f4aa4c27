"""Tokenizer and chat template: the tokens of one turn are a prefix of the tokens of the next turn."""

import hypothesis.strategies as st
import pytest
from hypothesis import assume, given

from model_server.core.request import Request, RequestId, TokenId
from model_server.text.answers import Answers
from model_server.text.language import ChatMessage
from model_server.text.standin import render_chat
from model_server.text.tokenizer import Tokenizer

ENGLISH = (
    "The gateway keeps a table of which server holds which part of a prompt, and it sends each request to the "
    "server that can answer it soonest. When two servers hold the same prefix, the one with less work is chosen; "
    "where none does, the request goes to the least loaded server, and the table learns from it."
)
texts = st.text(alphabet=st.sampled_from("ab zé.,<|>_ \n\t09漢🎉"), max_size=60) | st.text(max_size=40)


def answer_of(tokenizer: Tokenizer, prompt: list[TokenId], *, mean: int = 30) -> list[TokenId]:
    answers = Answers(tokenizer, mean_tokens=mean)
    request = Request(request_id=RequestId("x"), token_ids=list(prompt), max_tokens=10_000, arrival_s=0.0)
    while request.token_ids[-1] != answers.eos_token_id or request.num_output_tokens == 0:
        request.token_ids.append(answers.next_token(request))
    return request.token_ids[len(prompt) :]


@given(text=texts)
def test_the_pieces_of_a_text_cover_the_text(text: str) -> None:
    from model_server.text.tokenizer import PIECES  # noqa: PLC0415  # the one place that looks inside

    assert "".join(PIECES.findall(text)) == text


@given(text=texts, more=texts)
def test_all_tokens_but_the_last_of_a_text_begin_every_longer_text(text: str, more: str) -> None:
    assume("<|" not in text[-26:] and not text.endswith("<"))  # may be the beginning of a marker
    tokenizer = Tokenizer()
    short = tokenizer.encode(text)
    assert tokenizer.encode(text + more)[: max(0, len(short) - 1)] == short[:-1]


def test_english_has_about_four_characters_for_a_token() -> None:
    assert 3.5 <= len(ENGLISH) / len(Tokenizer().encode(ENGLISH)) <= 5.5


@pytest.mark.slow
@given(turns=st.lists(texts, min_size=1, max_size=4))
def test_a_conversation_with_its_answer_begins_the_next_turn(turns: list[str]) -> None:
    tokenizer = Tokenizer()
    messages = [ChatMessage("system", "Be brief.")]
    for turn in turns:
        messages.append(ChatMessage("user", turn))
        prompt = tokenizer.encode(render_chat(messages))
        answer = answer_of(tokenizer, prompt)
        text = "".join(tokenizer.decode(token) for token in answer[:-1])
        messages.append(ChatMessage("assistant", text))
        after = tokenizer.encode(render_chat([*messages, ChatMessage("user", "and then?")]))
        assert after[: len(prompt) + len(answer)] == prompt + answer


def test_answers_depend_only_on_the_prompt() -> None:
    first, second = Tokenizer(), Tokenizer()
    prompt = first.encode("Tell me a story")
    assert answer_of(first, prompt) == answer_of(second, prompt)
    assert answer_of(first, prompt) != answer_of(first, first.encode("Tell me another"))


@given(mean=st.integers(1, 50), text=st.text(min_size=1, max_size=10))
def test_the_length_of_an_answer_differs_from_the_mean_by_at_most_half(mean: int, text: str) -> None:
    tokenizer = Tokenizer()
    length = len(answer_of(tokenizer, tokenizer.encode(text), mean=mean)) - 1
    assert max(1, mean // 2) <= length <= max(1, mean * 3 // 2)


def test_only_single_tokens_can_be_registered() -> None:
    with pytest.raises(ValueError, match="is 2 pieces"):
        Tokenizer().register("two words")
