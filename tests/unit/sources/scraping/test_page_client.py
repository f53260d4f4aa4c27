"""Answers of metrics pages, as they arrive from a connection."""

from __future__ import annotations

import pytest

from epp.sources.scraping.metrics_page import MetricsError
from epp.sources.scraping.page_client import NoPageError, PageAnswer
from tests.harness.steps import steps

PAGE = b"vllm:num_requests_running 1\nvllm:num_requests_waiting 2\n"
SIZED = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(PAGE), PAGE)
CHUNKS = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n%b\r\n%X;name=value\r\n%b\r\n0\r\n" % (
    PAGE[:5],
    len(PAGE) - 5,
    PAGE[5:],
)


@pytest.mark.parametrize("piece_bytes", [1, 7, 1000])
@pytest.mark.parametrize("sent", [SIZED, CHUNKS + b"\r\n", CHUNKS + b"Trailer: x\r\n\r\n"])
def test_a_page_is_the_same_in_pieces_of_any_size(sent: bytes, piece_bytes: int) -> None:
    answer = PageAnswer(most_bytes=1000)
    pieces = [sent[at : at + piece_bytes] for at in range(0, len(sent), piece_bytes)]
    assert [answer.feed(piece) for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert answer.page() == PAGE
    assert answer.keeps_open


@pytest.mark.parametrize("end", [b"\r\n", b"Trailer: x\r\n\r\n"])
def test_a_page_is_the_same_wherever_its_answer_is_divided(end: bytes) -> None:
    sent = CHUNKS + end
    for at in range(1, len(sent)):
        answer = PageAnswer(most_bytes=len(PAGE))
        assert [answer.feed(sent[:at]), answer.feed(sent[at:])] == [False, True]
        assert answer.page() == PAGE, f"divided after {at} of {len(sent)} bytes"


def test_a_page_without_a_size_ends_with_its_connection() -> None:
    answer = PageAnswer(most_bytes=1000)
    assert not answer.feed(b"HTTP/1.0 200 OK\r\n\r\n" + PAGE)
    assert answer.end()
    assert answer.page() == PAGE
    assert not answer.keeps_open


@pytest.mark.parametrize("piece_bytes", [1, 7, 1000])
@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
def test_the_lines_of_a_head_may_end_without_a_carriage_return(line_end: bytes, piece_bytes: int) -> None:
    """RFC 9112, section 2.2, allows it."""
    page = b"vllm:num_requests_running 1\n\nvllm:num_requests_waiting 2\r\n\r\n"
    head = b"HTTP/1.1 200 OK\nContent-Length: %d\r\nConnection: close\n" % len(page)
    sent = b"HTTP/1.1 100 Continue\n" + line_end + head + line_end + page
    answer = PageAnswer(most_bytes=1000)
    pieces = [sent[at : at + piece_bytes] for at in range(0, len(sent), piece_bytes)]
    assert [answer.feed(piece) for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert answer.page() == page
    assert not answer.keeps_open


@pytest.mark.parametrize("sent", [b"", b"HTTP/1.1 200", SIZED[:-1], CHUNKS])
def test_an_answer_that_breaks_off_is_not_whole(sent: bytes) -> None:
    answer = PageAnswer(most_bytes=1000)
    assert not answer.feed(sent)
    assert not answer.end()


@pytest.mark.parametrize("value", [b"Close", b"close, TE", b"foo ,Close"])
def test_a_server_may_close_the_connection_after_its_answer(value: bytes) -> None:
    answer = PageAnswer(most_bytes=1000)
    assert answer.feed(SIZED.replace(b"\r\n", b"\r\nConnection: %b\r\n" % value, 1))
    assert not answer.keeps_open


@pytest.mark.parametrize("sent", [SIZED, CHUNKS + b"\r\n"])
def test_bytes_after_an_answer_are_not_taken_for_the_next_one(sent: bytes) -> None:
    answer = PageAnswer(most_bytes=1000)
    assert answer.feed(sent + b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n")
    assert answer.page() == PAGE
    assert not answer.keeps_open


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (b"SSH-2.0-OpenSSH_9.6\r\n", "not HTTP/1"),
        (b"HTTP/1.1 OK\r\n\r\n", "no status"),
        (b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 4000, "head of the answer has more than 16384 bytes"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n", "has the length"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", "has the length"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", "transfer encoding"),
        (CHUNKS.replace(b"\r\n5\r\n", b"\r\n-5\r\n"), "a chunk has the size"),
        (CHUNKS.replace(b"\r\n5\r\n", b"\r\n" + b"5" * 300), "a chunk has no size"),
        (CHUNKS.replace(b"\r\n5\r\n", b"\r\n4\r\n"), "does not end where it should"),
        (CHUNKS + b"a: b\r\n" * 4000, "no end after its last chunk"),
    ],
)
def test_what_is_not_http_is_refused(sent: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        PageAnswer(most_bytes=1000).feed(sent)


@pytest.mark.parametrize(
    "sent",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 1001\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nFFFFFFFF\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 1001,
    ],
)
def test_a_page_over_the_bound_is_refused_before_it_has_come(sent: bytes) -> None:
    with pytest.raises(MetricsError, match="more than 1000 bytes"):
        PageAnswer(most_bytes=1000).feed(sent)


def test_interim_answers_are_skipped() -> None:
    """Servers and proxies may send them whether a client asks or not (RFC 9110, section 15.2)."""
    sent = b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\nHTTP/1.1 100 Continue\r\n\r\n" + SIZED
    for piece_bytes in (1, 7, 1000):
        answer = PageAnswer(most_bytes=1000)
        pieces = [sent[at : at + piece_bytes] for at in range(0, len(sent), piece_bytes)]
        assert [answer.feed(piece) for piece in pieces] == [False] * (len(pieces) - 1) + [True]
        assert answer.page() == PAGE
        assert answer.keeps_open


def test_interim_answers_count_towards_the_size_of_the_head() -> None:
    answer = PageAnswer(most_bytes=1000)
    for _ in range(600):
        assert not answer.feed(b"HTTP/1.1 100 Continue\r\n\r\n")
    with pytest.raises(ValueError, match="head of the answer has more than 16384 bytes"):
        answer.feed(b"HTTP/1.1 100 Continue\r\n\r\n" * 100)


@pytest.mark.parametrize(
    ("status", "error"),
    [
        ("101 Switching Protocols", MetricsError),
        ("204 No Content", MetricsError),
        ("404 Not Found", MetricsError),
        ("503 Service Unavailable", NoPageError),
    ],
)
def test_only_status_200_has_a_page_and_5xx_is_a_failing_server(status: str, error: type[Exception]) -> None:
    with pytest.raises(MetricsError, match=f"HTTP status {status[:3]}") as raised:
        PageAnswer(most_bytes=1000).feed(SIZED.replace(b"200 OK", status.encode()))
    assert type(raised.value) is error


def test_a_page_in_too_many_chunks_is_refused() -> None:
    answer = PageAnswer(most_bytes=2**30)
    answer.feed(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 4096)
    with pytest.raises(MetricsError, match="more than 4096 chunks"):
        answer.feed(b"1\r\nx\r\n")


def test_the_work_for_chunks_of_one_byte_grows_with_their_number() -> None:
    def work(chunks: int) -> int:
        answer = PageAnswer(most_bytes=2**30)
        answer.feed(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        sent = b"1\r\nx\r\n" * chunks
        pieces = [sent[at : at + 4099] for at in range(0, len(sent), 4099)]
        return steps(lambda: [answer.feed(piece) for piece in pieces])

    assert work(4_000) < 9 * work(500)
