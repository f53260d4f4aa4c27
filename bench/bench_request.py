"""Measures what parsing a request body costs: microseconds by API and size, the best and the median of many
runs.

Run with `python -m bench.bench_request`. Prints a table, and asserts nothing, since machines differ.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable

from epp.base.types import ApiKind
from epp.request.parse import parse_request
from epp.request.response import ResponseReader

SIZES_KB = (1, 40, 400)
RUNS = {1: 2000, 40: 500, 400: 200}
WORDS = "The quick brown fox jumps over the lazy dog and runs on through the wood.\n"


def text(size_bytes: int) -> str:
    return (WORDS * (size_bytes // len(WORDS) + 1))[:size_bytes]


def chat_body(size_bytes: int, *, messages: int) -> bytes:
    share = size_bytes // messages
    turns = [{"role": ("user", "assistant")[n % 2], "content": text(share)} for n in range(messages)]
    return json.dumps({"model": "base", "messages": turns, "stream": True, "max_tokens": 64}).encode()


def completion_body(size_bytes: int) -> bytes:
    return json.dumps({"model": "base", "prompt": text(size_bytes), "max_tokens": 64}).encode()


def unicode_body(size_bytes: int) -> bytes:
    content = "Привет, мир и все. " * (size_bytes // 33)
    return json.dumps(
        {"model": "base", "messages": [{"role": "user", "content": content}]}, ensure_ascii=False
    ).encode()


def token_body(size_bytes: int) -> bytes:
    return json.dumps({"model": "base", "prompt": [n % 32000 for n in range(size_bytes // 7)]}).encode()


def timed_us(run: Callable[[], object], runs: int) -> tuple[float, float]:
    """Return the best and the median of `runs` calls, in microseconds."""
    run()
    samples = []
    for _ in range(runs):
        start = time.perf_counter_ns()
        run()
        samples.append((time.perf_counter_ns() - start) / 1000)
    return min(samples), statistics.median(samples)


def sampled_answer(chunks: int) -> list[bytes]:
    frames = [{"choices": [{"index": 0, "delta": {"content": f" word{n}"}}]} for n in range(chunks)]
    return [b"data: " + json.dumps(frame).encode() + b"\n\n" for frame in frames] + [b"data: [DONE]\n\n"]


def read_answer(pieces: list[bytes]) -> object:
    reader = ResponseReader(kind=ApiKind.CHAT, content_type="text/event-stream", content_encoding="")
    for piece in pieces:
        reader.feed(piece, now=1.0)
    return reader.finish()


def show(label: str, size: str, run: Callable[[], object], runs: int) -> None:
    best, median = timed_us(run, runs)
    print(f"{label:<28}{size:>10}{best:>12.1f}{median:>12.1f}")


def main() -> None:
    print(f"{'what':<28}{'size':>10}{'best us':>12}{'median us':>12}")
    for size_kb in SIZES_KB:
        size, runs = size_kb * 1000, RUNS[size_kb]
        bodies = (
            ("chat, one message", "/v1/chat/completions", chat_body(size, messages=1)),
            ("chat, 200 messages", "/v1/chat/completions", chat_body(max(size, 4000), messages=200)),
            ("chat, two-byte letters", "/v1/chat/completions", unicode_body(size)),
            ("completion, text", "/v1/completions", completion_body(size)),
            ("completion, token ids", "/v1/completions", token_body(size)),
        )
        for label, path, body in bodies:
            show(label, f"{len(body) / 1000:.0f} KB", lambda p=path, b=body: parse_request(p, b), runs)  # type: ignore[misc]  # defaults bind the loop's values
    for chunks in (100, 1000):
        pieces = sampled_answer(chunks)
        show("sampled answer, SSE", f"{chunks} ch", lambda p=pieces: read_answer(p), 50)  # type: ignore[misc]  # as above


if __name__ == "__main__":
    main()
