"""Answers of metrics pages, as they arrive from a connection."""

import asyncio
from contextlib import suppress
from functools import partial

import pytest

from epp.sources.scraping.metrics_page import MetricsError
from epp.sources.scraping.page_client import AnswerStream, NoPageError, read_answer
from tests.harness.steps import steps

PAGE = b"vllm:num_requests_running 1\nvllm:num_requests_waiting 2\n"
SIZED = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(PAGE), PAGE)
CHUNKS = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n%b\r\n%X;name=value\r\n%b\r\n0\r\n" % (
    PAGE[:5],
    len(PAGE) - 5,
    PAGE[5:],
)


async def read(*pieces: bytes, most_bytes: int = 1000, ends: bool = False) -> tuple[bytes, bool]:
    """Read an answer whose pieces come one after the other. The connection stays open unless it `ends`.

    The answer has to be whole with the last piece, and not earlier.
    """
    stream = AnswerStream()
    task = asyncio.create_task(read_answer(stream, most_bytes=most_bytes))
    for piece in pieces:
        assert not task.done(), f"it ended before {piece!r}"
        stream.feed_data(piece)
        for _ in range(4):
            await asyncio.sleep(0)
    if ends:
        stream.feed_eof()
    async with asyncio.timeout(5):
        answer = await task
    return bytes(answer.body), answer.keeps_open


def cut(sent: bytes, *, piece_bytes: int) -> list[bytes]:
    return [sent[at : at + piece_bytes] for at in range(0, len(sent), piece_bytes)]


@pytest.mark.parametrize("piece_bytes", [1, 7, 1000])
@pytest.mark.parametrize("sent", [SIZED, CHUNKS + b"\r\n"])
async def test_a_page_is_the_same_in_pieces_of_any_size(sent: bytes, piece_bytes: int) -> None:
    assert await read(*cut(sent, piece_bytes=piece_bytes)) == (PAGE, True)


async def test_a_page_is_the_same_wherever_its_answer_is_divided() -> None:
    sent = CHUNKS + b"\r\n"
    for at in range(1, len(sent)):
        assert await read(sent[:at], sent[at:], most_bytes=len(PAGE)) == (PAGE, True), f"divided after {at}"


async def test_a_page_without_a_size_ends_with_its_connection() -> None:
    assert await read(b"HTTP/1.0 200 OK\r\n\r\n" + PAGE, ends=True) == (PAGE, False)


@pytest.mark.parametrize("piece_bytes", [1, 7, 1000])
@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
async def test_interim_heads_and_bare_line_ends_are_taken(line_end: bytes, piece_bytes: int) -> None:
    """RFC 9110, section 15.2, and RFC 9112, section 2.2, allow it, whether a client asks or not."""
    page = b"vllm:num_requests_running 1\n\nvllm:num_requests_waiting 2\r\n\r\n"
    head = b"HTTP/1.1 200 OK\nContent-Length: %d\r\nConnection: close\n" % len(page)
    sent = (
        b"HTTP/1.1 103 Early Hints\nLink: </a>\n\nHTTP/1.1 100 Continue\n" + line_end + head + line_end + page
    )
    assert await read(*cut(sent, piece_bytes=piece_bytes)) == (page, False)


@pytest.mark.parametrize("sent", [b"HTTP/1.1 200", SIZED[:-1], CHUNKS, CHUNKS[:-2]])
async def test_an_answer_that_breaks_off_is_not_whole(sent: bytes) -> None:
    with pytest.raises(NoPageError, match="before the end of its answer") as raised:
        await read(sent, ends=True)
    assert raised.value.status == 0


async def test_a_connection_that_ends_without_an_answer_was_reset() -> None:
    with pytest.raises(ConnectionResetError):
        await read(ends=True)


@pytest.mark.parametrize("value", [b"Close", b"close, TE", b"foo ,Close"])
async def test_a_server_may_close_the_connection_after_its_answer(value: bytes) -> None:
    sent = SIZED.replace(b"\r\n", b"\r\nConnection: %b\r\n" % value, 1)
    assert await read(sent) == (PAGE, False)


@pytest.mark.parametrize("sent", [SIZED, CHUNKS + b"\r\n", CHUNKS + b"Trailer: x\r\n\r\n"])
async def test_bytes_after_an_answer_are_not_taken_for_the_next_one(sent: bytes) -> None:
    assert await read(sent + b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n") == (PAGE, False)


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (b"SSH-2.0-OpenSSH_9.6\r\n", "not HTTP/1"),
        (b"HTTP/1.1 OK\r\n\r\n", "no status"),
        (b"HTTP/1.1 100 Continue\r\n\r\n\r\n\r\n", "no status"),
        (
            b"HTTP/1.1 200 OK\r\n" + b"a: %b\r\n" % (b"b" * 100) * 200,
            "head of the answer has more than 16384 bytes",
        ),
        (b"HTTP/1.1 100 Continue\r\n\r\n" * 700, "head of the answer has more than 16384 bytes"),
        (b"HTTP/1.1 200 OK\r\n" + b"a\n" * 300 + b"\n", "or 256 lines"),
        (b"HTTP/1.1 200 OK\r\n" + b"a" * 2**17, "limit"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n", "has the length"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", "has the length"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", "transfer encoding"),
        (CHUNKS.replace(b"\r\n5\r\n", b"\r\n-5\r\n"), "a chunk has the size"),
        (CHUNKS.replace(b"\r\n5\r\n", b"\r\n" + b"5" * 300), "a chunk has the size"),
        (CHUNKS.replace(b"\r\n5\r\n", b"\r\n5;%b\r\n" % (b"x" * 300)), "a chunk has the size"),
        (CHUNKS.replace(b"\r\n5\r\n", b"\r\n4\r\n"), "does not end where it should"),
    ],
)
async def test_what_is_not_http_is_refused(sent: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        await read(sent)


@pytest.mark.parametrize(
    "sent",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 1001\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nFFFFFFFF\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 1001,
    ],
)
async def test_a_page_over_the_bound_is_refused_before_it_has_come(sent: bytes) -> None:
    with pytest.raises(MetricsError, match="more than 1000 bytes"):
        await read(sent)


@pytest.mark.parametrize("status", [101, 204, 302, 404, 503])
async def test_an_answer_with_another_status_has_no_page(status: int) -> None:
    with pytest.raises(NoPageError, match=f"HTTP status {status}") as raised:
        await read(SIZED.replace(b"200", b"%d" % status))
    assert raised.value.status == status


@pytest.mark.parametrize(
    ("most", "chunk_bytes", "match"),
    [(256, 1, "chunks of less than 64 bytes"), (4096, 64, "than 4096 chunks")],
)
async def test_a_page_in_too_many_chunks_is_refused(most: int, chunk_bytes: int, match: str) -> None:
    head, chunk = CHUNKS.partition(b"5\r\n")[0], b"%X\r\n%b\r\n" % (chunk_bytes, b"x" * chunk_bytes)
    whole = await read(head + chunk * most + b"0\r\n\r\n", most_bytes=2**30)
    assert whole == (b"x" * chunk_bytes * most, True)
    with pytest.raises(MetricsError, match=match):
        await read(head + chunk * (most + 1), most_bytes=2**30)


async def test_a_page_in_bytes_takes_few_steps_in_short_turns() -> None:
    stream, turns = AnswerStream(), list[int]()
    stream.feed_data(CHUNKS.partition(b"5\r\n")[0] + b"1\r\nx\r\n" * 250 + b"0\r\n\r\n")
    answer = read_answer(stream, most_bytes=1000)
    with suppress(StopIteration):
        while True:
            turns.append(steps(partial(answer.send, None)))
    assert len(turns) == 250 // 32
    assert max(turns) < 32 * 20
