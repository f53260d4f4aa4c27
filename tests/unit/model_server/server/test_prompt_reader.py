"""Bodies and prompts are measured while they are bytes, and refused before they are decoded."""

import contextlib
import json
import random
import tracemalloc
from typing import Any

import pytest

from model_server.core.request import TokenId
from model_server.server.errors import ApiError, TooLongError
from model_server.server.models import ServedModels
from model_server.server.openai import Job, RequestReader, read_body
from model_server.server.responses import Responses, ResponsesBody
from model_server.server.sampling import SamplingReader
from model_server.text.pictures import picture_text
from model_server.text.standin import StandInLanguage
from model_server.text.tokenizer import PIECES, Tokenizer
from tests.unit.request.test_media import PICTURES, by_data, jpeg

MAX_LEN = 1000
MOST_CHARACTERS = MAX_LEN * 28
BODY_BYTES = 4_000_000
CHAT = b'{"messages":[{"role":"user","content":"Hi"}],'


class CountingLanguage(StandInLanguage):
    """Counts the characters that it has to cut into tokens."""

    def __init__(self) -> None:
        super().__init__(Tokenizer(), eos_token_id=TokenId(0))
        self.characters = 0

    def encode(self, text: str) -> list[TokenId]:
        self.characters += len(text)
        return super().encode(text)

    def encode_chat(self, *messages: Any, **more: Any) -> list[TokenId]:
        tokens = super().encode_chat(*messages, **more)
        self.characters += len(json.dumps([[m.content, *m.tool_calls] for m in messages[0]]))
        self.characters += len(json.dumps(more["tools"]))
        return tokens


def reader(language: StandInLanguage | None = None, *, made_up: bool = True) -> RequestReader:
    return RequestReader(
        models=ServedModels(names=["demo"], root="demo"),
        language=language or CountingLanguage(),
        sampling=SamplingReader(made_up=made_up, rng=random.Random(1)),
        max_len_tokens=MAX_LEN,
    )


def test_a_body_is_read_as_vllm_reads_it() -> None:
    job = reader().completion(b'\xef\xbb\xbf{"prompt":"a","max_tokens":4.0,"n":"2","stream":1}')
    assert (job.max_tokens, job.answers_each, job.stream) == (4, 2, True)


PICTURE = {"type": "image_url", "image_url": "https://img.example/a.png"}


@pytest.mark.parametrize(
    ("url", "tokens"),
    [
        *((by_data(PICTURES[name])["image_url"]["url"], 720) for name in ("png", "gif", "jpeg")),
        *((by_data(jpeg(side, side))["image_url"]["url"], most) for side, most in ((1, 4), (9_999, 16_384))),
        *(
            (url, 1024)
            for url in ("https://img.example/a.png", "data:image/bmp;base64,Qk0=", "data:;base64,%")
        ),
    ],
)
def test_a_picture_is_as_many_tokens_as_its_size_says(url: str, tokens: int) -> None:
    shown, other = picture_text(url), picture_text(f"{url}A")
    encode = Tokenizer().encode
    assert (
        encode(f"{shown}12 more")[: 1 + tokens] == encode(shown) == [*encode("<|image|>"), *encode(shown)[1:]]
    )
    assert len(encode(shown)) == 1 + tokens
    assert encode(shown)[:16] != encode(other)[:16]


@pytest.mark.parametrize(
    ("made_up", "count", "why"), [(False, 1, "text parts only"), (True, 101, "at most 100 pictures")]
)
def test_a_real_model_takes_no_pictures_and_a_made_up_one_100(*, made_up: bool, count: int, why: str) -> None:
    body = {"messages": [{"role": "user", "content": [PICTURE] * count}]}
    with pytest.raises(ApiError, match=why):
        reader(made_up=made_up).chat(json.dumps(body).encode())


def repeated(piece: bytes) -> bytes:
    return piece * (BODY_BYTES // len(piece))


HOSTILE = {
    "text in tools": ("chat", CHAT + b'"tools":[{"a":"' + repeated(b"word ") + b'"}]}'),
    "objects in tools": ("chat", CHAT + b'"tools":[' + repeated(b"{},") + b"{}]}"),
    "numbers in tools": ("chat", CHAT + b'"tools":[{"a":[' + repeated(b"1e-310,") + b"1]}]}"),
    "text in tool calls": (
        "chat",
        b'{"messages":[{"role":"user","tool_calls":["' + repeated(b"word ") + b'"]}]}',
    ),
    "lists in tool calls": (
        "chat",
        b'{"messages":[{"role":"user","tool_calls":[' + repeated(b"[],") + b"[]]}]}",
    ),
    "template variables": ("chat", CHAT + b'"chat_template_kwargs":{"a":[' + repeated(b"{},") + b"1]}}"),
    "messages": ("chat", b'{"messages":[' + repeated(b'{"role":"a"},') + b'{"role":"a"}]}'),
    "parts": ("chat", b'{"messages":[{"role":"a","content":[' + repeated(b'{"type":"text"},') + b"1]}]}"),
    "text to count": ("tokenize", b'{"prompt":"' + repeated(b"a-") + b'"}'),
    "tools to count": ("tokenize", CHAT + b'"tools":[{"a":"' + repeated(b"word ") + b'"}]}'),
    "token ids": ("completion", b'{"prompt":[' + repeated(b"1,") + b"1]}"),
    "lists of token ids": ("completion", b'{"prompt":[' + repeated(b"[1],") + b"[1]]}"),
    "strings": ("completion", b'{"prompt":[' + repeated(b'"ab",') + b'"ab"]}'),
    "numbers": ("completion", b'{"prompt":[' + repeated(b"1e-310,") + b"1]}"),
    "token ids to turn back": ("detokenize", b'{"tokens":[' + repeated(b"1,") + b"1]}"),
    "stop strings": ("completion", b'{"prompt":"a","stop":[' + repeated(b'"ab",') + b'"ab"]}'),
    "stop tokens": ("completion", b'{"prompt":"a","stop_token_ids":[' + repeated(b"1000,") + b"1]}"),
    "answer format": ("completion", b'{"prompt":"a","response_format":{"a":[' + repeated(b"{},") + b"1]}}"),
    "salt": ("completion", b'{"prompt":"a","cache_salt":"' + repeated(b"salt") + b'"}'),
    "model": ("completion", b'{"prompt":"a","model":"' + repeated(b"name") + b'"}'),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_long_body_is_refused_without_making_objects_or_tokens_of_it(case: str) -> None:
    method, raw = HOSTILE[case]
    language = CountingLanguage()
    ours = reader(language)
    tracemalloc.start()
    try:
        with pytest.raises(ApiError) as refused:
            getattr(ours, method)(raw)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak <= 2.2 * len(raw)  # a copy of the body, and its text if the body is one text
    assert language.characters <= MOST_CHARACTERS
    assert len(str(refused.value)) < 500


def responses(language: StandInLanguage) -> Responses:
    return Responses(reader(language).prompts)


def turns(piece: dict[str, str], *, count: int) -> list[dict[str, Any]]:
    """Return `count` calls, results or items, in one message if they are its parts."""
    parts = piece["type"] in ("tool_use", "tool_result")
    return [{"role": "user", "content": [piece] * count}] if parts else [piece] * count


@pytest.mark.parametrize("kind", ["tool_use", "tool_result", "function_call", "function_call_output"])
def test_calls_and_results_count_as_messages_before_they_are_made(kind: str) -> None:
    language = CountingLanguage()
    conversation = turns({"type": kind}, count=MAX_LEN + 1)
    raw = json.dumps({"messages": conversation, "input": conversation}).encode()
    body = read_body(raw, ResponsesBody)
    with pytest.raises(TooLongError, match=r"100[12] messages, calls and results"):
        reader(language).chat(raw) if kind.startswith("tool") else responses(language).chat_of(body)
    assert language.characters == 0


def test_a_body_of_many_items_is_refused_without_making_objects_of_it() -> None:
    raw = b'{"input":[' + repeated(b'{"type":"function_call"},') + b"{}]}"
    body = read_body(raw, ResponsesBody)
    tracemalloc.start()
    try:
        with pytest.raises(TooLongError):
            responses(CountingLanguage()).chat_of(body)
        assert tracemalloc.get_traced_memory()[1] <= 2.2 * len(raw)
    finally:
        tracemalloc.stop()


def test_empty_messages_of_kept_responses_count_too() -> None:
    kept = responses(CountingLanguage())
    for index in range(100):
        kept.keep({"id": f"resp_{index}"}, [{"role": "u", "content": ""} for _ in range(8_166)])
    found = []
    for index in range(100):
        raw = json.dumps({"input": "x", "previous_response_id": f"resp_{index}"}).encode()
        with contextlib.suppress(ApiError):
            found.append(len(kept.chat_of(read_body(raw, ResponsesBody))[1]))
    assert 1 <= len(found) <= 20


@pytest.mark.parametrize(
    "field", ["tools", "tool_calls", "chat_template_kwargs", "content", "parts", "prompt"]
)
def test_every_text_of_a_conversation_counts_towards_the_models_length(field: str) -> None:
    def body(characters: int) -> bytes:
        text = "x" * characters
        parts = [{"type": "text", "text": text[: characters // 2]}] * 2
        value = {"content": text, "parts": parts}.get(field, "Hi")
        calls = {"tool_calls": [text]} if field == "tool_calls" else {}
        around = {"tools": [{"a": text}], "chat_template_kwargs": {"a": text}, "prompt": text}
        fields = {field: around[field]} if field in around else {}
        return json.dumps({"messages": [{"role": "user", "content": value, **calls}], **fields}).encode()

    read = reader().completion if field == "prompt" else reader().chat
    with pytest.raises(TooLongError, match="cannot fit"):
        read(body(MOST_CHARACTERS + 2))
    assert isinstance(read(body(4000)), Job)


def test_prompts_and_answers_of_one_request_have_a_common_bound() -> None:
    ids = list(range(MAX_LEN - 10))
    fits = json.dumps({"prompt": ids, "n": 16, "max_tokens": 1}).encode()
    assert len(reader().completion(fits).prompts) == 16
    for body in (
        {"prompt": ids, "n": 17, "max_tokens": 1},
        {"prompt": [ids] * 17, "max_tokens": 1},
        {"prompt": ["a b c d e f g h " * 100] * 21, "max_tokens": 1},
    ):
        with pytest.raises(ApiError, match=r"several smaller requests|cannot fit"):
            reader().completion(json.dumps(body).encode())


@pytest.mark.parametrize(
    "prompt",
    ["ab cd", ["ab cd", 'quotes "inside", and\\ such'], [1, 2, 3], [[1, 2], [3]], ["Ж" * 5_000]],
    ids=["text", "texts", "ids", "lists of ids", "escaped characters"],
)
def test_prompts_of_every_shape_are_read_as_they_were_sent(prompt: Any) -> None:
    raw = json.dumps({"prompt": prompt, "max_tokens": 1}, indent=2).encode()
    many = prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
    wanted = [Tokenizer().encode(one) if isinstance(one, str) else one for one in many]
    assert list(reader().completion(raw).prompts) == wanted


def test_tools_and_calls_reach_the_template_as_they_were_sent() -> None:
    seen: list[Any] = []

    class Recording(CountingLanguage):
        def encode_chat(self, *messages: Any, **more: Any) -> list[TokenId]:
            seen.append((*messages, more["tools"], more["variables"]))
            return super().encode_chat(*messages, **more)

    tools = [{"type": "function", "function": {"name": "f", "x": [1, 2.5, -1e-310, None, True, "é\n"]}}]
    calls = [{"id": "1", "function": {"arguments": '{"a": 1}'}}]
    body = {
        "messages": [{"role": "assistant", "content": None, "tool_calls": calls}],
        "tools": tools,
        "chat_template_kwargs": {"enable_thinking": False},
        "add_generation_prompt": False,
    }
    reader(Recording()).chat(json.dumps(body).encode())
    [(messages, given_tools, variables)] = seen
    assert list(messages[0].tool_calls) == calls
    assert given_tools == tools
    assert variables == {"enable_thinking": False, "add_generation_prompt": False}


def test_a_long_text_is_cut_in_parts_into_the_tokens_of_the_whole() -> None:
    rng = random.Random(7)
    words = ["hello", " world", "<|user|>", "<", "|", "_", "  ", "\n\n", "12345", "!?", "é", "漢字", "x" * 30]
    for _ in range(20):
        text = "".join(rng.choices(words, k=rng.randrange(20_000)))
        tokenizer = Tokenizer()
        pieces = [tokenizer.encode(piece)[0] for piece in PIECES.findall(text)]
        assert tokenizer.encode(text) == pieces


@pytest.mark.parametrize(
    ("most", "max_tokens", "kept"),
    [(5, 10, 5), (-1, 10, MAX_LEN - 10), (-1, None, MAX_LEN - 1), (5000, 1, None)],
)
def test_long_prompt_is_cut_to_its_last_tokens_if_the_request_asks_for_it(
    most: int, max_tokens: int | None, kept: int | None
) -> None:
    text = " word" * 2000
    whole = Tokenizer().encode(text)
    messages = [{"role": "user", "content": text}]
    asked = {"truncate_prompt_tokens": most, "max_tokens": max_tokens}
    completion = json.dumps({"prompt": text, **asked, "max_tokens": max_tokens or 1}).encode()
    chat = json.dumps({"messages": messages, **asked}).encode()
    if kept is None:
        with pytest.raises(TooLongError):
            reader().completion(completion)
        return
    [prompt] = reader().completion(completion).prompts
    assert prompt == whole[-kept:]
    [prompt] = reader().chat(chat).prompts
    assert len(prompt) == kept
    for wrong in (0, -2):
        with pytest.raises(ApiError, match="must be -1 or at least 1"):
            reader().completion(
                json.dumps({"prompt": "x", "truncate_prompt_tokens": wrong, "max_tokens": 1}).encode()
            )


class Watched(bytes):
    """A body that keeps how many bytes it was searched for at a time."""

    portions: list[int]

    def __getitem__(self, part: Any) -> Any:
        self.portions.append(part.stop - part.start)
        return super().__getitem__(part)


@pytest.mark.parametrize(
    "body",
    [
        b"{" + b'"n":1,' * 5_000_000 + b'"prompt":"a"}',
        b'{"prompt":[' + b"1," * 15_000_000 + b"1]}",
        b'{"prompt":"a","n":[' + (b"[" * 400 + b"]" * 400 + b",") * 37_000 + b"1]}",
        b'{"prompt":"a","model":"' + b"\\u00e9" * 5_000_000 + b'"}',
    ],
    ids=["fields", "numbers", "nested lists", "escapes"],
)
def test_a_body_of_30_mb_that_decodes_slowly_is_refused_undecoded(body: bytes) -> None:
    raw = Watched(body)
    raw.portions = []
    with pytest.raises(ApiError, match="more than 1,048,576 fields"):
        reader().completion(raw)
    assert max(raw.portions) == 2**20
