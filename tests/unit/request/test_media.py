"""First guesses at the tokens of media, and what one part of a prompt can cost."""

import json
from base64 import b64encode
from struct import pack
from typing import Any

import pytest

from epp.base.types import Media
from epp.request.media import UNKNOWN_TOKENS
from tests.harness.steps import steps
from tests.unit.request.asked import CHAT, parse


def jpeg(width: int, height: int, *, segments: int = 1) -> bytes:
    """Return the beginning of a JPEG with a preview of 60,000 bytes in each segment before the size."""
    preview = b"\xff\xe1" + pack(">H", 60_000) + bytes(59_998)
    return b"\xff\xd8" + preview * segments + b"\xff\xc2" + pack(">HBHH", 17, 8, height, width) + bytes(40)


def webp(kind: bytes, size: bytes) -> bytes:
    return b"RIFF\0\0\0\0WEBPVP8" + kind + bytes(4) + size + bytes(20)


PICTURES = {
    "png": b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + pack(">II", 1000, 560) + bytes(20),
    "gif": b"GIF89a" + pack("<HH", 1000, 560) + bytes(30),
    "jpeg": jpeg(1000, 560),
    "lossy webp": webp(b" ", b"\0\0\0\x9d\x01\x2a" + pack("<HH", 1000, 560)),
    "lossless webp": webp(b"L", b"\x2f" + pack("<I", 999 | 559 << 14)),
    "extended webp": webp(b"X", bytes(4) + (999).to_bytes(3, "little") + (559).to_bytes(3, "little")),
}


def tokens(*parts: dict[str, Any]) -> int:
    return sum(parse(CHAT, messages=[{"role": "user", "content": list(parts)}]).media)


def test_each_kind_of_media_is_counted_by_itself() -> None:
    sound = {"type": "input_audio", "input_audio": {"format": "mp3", "data": "A" * 4 * 16_000}}
    film, other = by_data(bytes(6_000), kind="video"), {"type": "tool_reference", "tool_name": "a"}
    asked = [{"role": "user", "content": [sound, by_data(jpeg(28, 56)), film, film, other]}]
    assert parse(CHAT, messages=asked).media == Media(pictures=4, sound=76, films=14, texts=12)


def by_data(data: bytes, *, kind: str = "image") -> dict[str, Any]:
    url = f"data:{kind}/x;base64,{b64encode(data).decode()}"
    return {"type": f"{kind}_url", f"{kind}_url": {"url": url}}


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_has_a_token_for_each_square_of_28_pixels(name: str) -> None:
    assert tokens(by_data(PICTURES[name])) == 36 * 20
    source = {"type": "base64", "media_type": "image/x", "data": b64encode(PICTURES[name]).decode()}
    assert tokens({"type": "image", "source": source}) == 36 * 20


@pytest.mark.parametrize(("side", "expected"), [(1, 4), (60_000, 16_384)])
def test_a_picture_has_4_to_16384_tokens(side: int, expected: int) -> None:
    assert tokens(by_data(jpeg(side, side))) == expected


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        (
            by_data(b"RIFF\0\0\0\0WAVEfmt " + bytes(12) + pack("<I", 32_000) + bytes(319_967), kind="audio"),
            251,
        ),
        (by_data(bytes(600_000), kind="video"), 601),
        (by_data(b"RIFF\0\0\0\0WAVEfmt " + bytes(12) + pack("<I", 1) + bytes(99_000), kind="audio"), 16_384),
        ({"type": "image_url", "image_url": {"url": "https://img.example/?data:text/"}}, UNKNOWN_TOKENS),
        ({"type": "image_url", "image_url": None, "uuid": "u1"}, UNKNOWN_TOKENS),
        (by_data(b"BM" + bytes(90)), UNKNOWN_TOKENS),
        (by_data(b"\xff\xd8" + b"\xff\xe0\0\2" * 99), UNKNOWN_TOKENS),
        (by_data(b"\x89PNG"), UNKNOWN_TOKENS),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,\u00e9=a"}}, UNKNOWN_TOKENS),
        ({"type": "text", "text": "data:image/png;base64,AAAA"}, 0),
        ({"type": "tool_result", "content": 100 * [{"type": "tool_reference", "tool_name": "search"}]}, 1300),
        ({"type": "tool_result", "content": "text"}, 0),
        ({"type": "web_search_tool_result", "content": "A" * 3951}, 1001),
        ({"type": "document", "source": {"data": "A" * 3931, "media_type": "text/plain"}}, 1001),
        ({"type": "input_file", "file_data": "data:text/csv;base64," + "A" * 3942}, 1001),
    ],
)
def test_other_media_count_by_their_length_or_as_a_usual_picture(part: dict[str, Any], expected: int) -> None:
    assert tokens(part) == expected


def test_all_media_of_a_prompt_are_added_up() -> None:
    result = {"type": "tool_result", "content": [by_data(PICTURES["gif"])]}
    assert tokens(result, by_data(PICTURES["png"])) == 2 * 720
    assert parse("/v1/embeddings", messages=[{"role": "user", "content": [result]}]).media == Media(720)
    items = [{"role": "user", "content": [{"type": "input_image", "image_url": "https://img.example/a"}]}]
    named = parse("/v1/responses", input=items, previous_response_id="resp_1")
    assert named.media == Media(pictures=UNKNOWN_TOKENS, others=UNKNOWN_TOKENS)


@pytest.mark.parametrize(
    ("part", "count"),
    [({"type": "image_url", "image_url": {"url": "u"}}, 100), (by_data(jpeg(60_000, 60_000, segments=0)), 8)],
)
def test_all_media_of_a_request_count_as_at_most_16384_tokens(part: dict[str, Any], count: int) -> None:
    assert tokens(*[part] * count) == 16_384


def test_many_pictures_cost_no_more_than_many_texts() -> None:
    worst = by_data(jpeg(9, 9, segments=0)[:2] + b"\xff\xe0\0\2" * 40)
    body = [{"role": "user", "content": [worst] * 200}]
    plain = [{"role": "user", "content": [{"type": "x", "x": json.dumps(worst)}] * 200}]
    assert steps(lambda: parse(CHAT, messages=body)) < 1.5 * steps(lambda: parse(CHAT, messages=plain))
