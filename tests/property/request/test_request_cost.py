"""No body costs more than ten times as much time and memory as plain text of its size.

This is a fuzzer for cost. It does not look for exceptions but for the most work and memory that a byte can
cause. Work is the number of lines of Python that run. What C does for a body is bounded by the objects that
it makes, which take memory. PREFIX_GATEWAY_COST_ROUNDS=20000 searches for longer.
"""

import itertools
import os
import random
import tracemalloc
from collections.abc import Callable, Iterator

import pytest

from epp.base.errors import BadRequestError
from epp.base.types import ApiKind
from epp.request.jsontext import PLAIN_NS
from epp.request.parse import COSTLY, parse_request
from epp.request.response import ResponseReader
from tests.harness.hostile_bodies import (
    CHAT,
    COMPLETIONS,
    MESSAGES,
    RESPONSES,
    BodyShape,
    every_shape,
    plain,
    shapes,
)
from tests.harness.steps import steps

ROUNDS = int(os.environ.get("PREFIX_GATEWAY_COST_ROUNDS", "1500"))
SIZES = (3_000, 30_000, 200_000)
LARGEST = 33_000_000

FLOOR_NS = 1_000_000
"""The least cost of any request, as in epp/request/jsontext.py. It costs as much to pass a request on."""
TIMES_PLAIN = 10
LINE_NS = 50
"""The time of a line of Python on a core of 2024."""
SLACK = 3
"""A line of Python often takes less than `LINE_NS`. The bodies that a review found cost a hundred times as
much as they may.
"""

WORST = [
    # A review found these: 368 ms, 66, 62 and 50 for 400 KB, where plain text took 0.32.
    BodyShape(CHAT, '{"model":"m","messages":[{"role":"user","content":[{"type":"x","x":[', "1e-310,", "0]}]}]}"),
    BodyShape("/v1/embeddings", '{"model":"m","input":[', "[],", "[0]]}"),
    BodyShape(COMPLETIONS, '{"model":"m","prompt":[', "1,", "0]}"),
    BodyShape(CHAT, '{"model":"m","messages":[{"role":"user","content":[', '{"type":""},', '{"text":""}]}]}'),
    # This fuzzer found these while the counting was written.
    BodyShape(RESPONSES, '{"model":"m","input":[{"role":"user","content":[', "0,", '""]}]}'),
    BodyShape(CHAT, '{"model":"m","messages":[{"role":"\\ud800","content":"', "😀", '"}]}'),
    BodyShape(MESSAGES, '{"model":"m","messages":[{"role":"user","content":[', '{"type":"x","b":0,"a":0},', '""]}]}'),
    BodyShape(COMPLETIONS, '{"model":"m","prompt":["",', '"中",', '""]}'),
    BodyShape(COMPLETIONS, '{"model":"m","prompt":', " ", '"x"}'),
    BodyShape(CHAT, '{"model":"m","messages":[{"role":"user","content":[', '{"type":"tool_result","content":[', ""),
    BodyShape(CHAT, '{"model":"m","x":', "[", ""),
]  # fmt: skip


def read(path: str, body: bytes) -> str:
    try:
        return parse_request(path, body).unread or "read"
    except BadRequestError as error:
        return error.reason


def too_costly(shape: BodyShape, size_bytes: int) -> str:
    """Return an empty text if the body is within its bounds."""
    body = shape.body(size_bytes)
    work_ns = LINE_NS * steps(lambda: read(shape.path, body))
    if work_ns <= SLACK * (FLOOR_NS + TIMES_PLAIN * PLAIN_NS * len(body)):
        return ""
    return f"{work_ns / 1e6:.2f} ms of Python: {shape} of {size_bytes} bytes"


def random_shapes() -> Iterator[BodyShape]:
    return itertools.islice(
        shapes(random.Random(int(os.environ.get("PREFIX_GATEWAY_COST_SEED", "1")))), ROUNDS
    )


@pytest.mark.parametrize("shape", WORST)
@pytest.mark.parametrize("size_bytes", [*SIZES, 4_000_000])
def test_the_worst_bodies_cost_ten_times_plain_text_at_most(shape: BodyShape, size_bytes: int) -> None:
    assert not too_costly(shape, size_bytes)


@pytest.mark.slow
def test_no_piece_at_any_place_of_a_body_costs_more() -> None:
    assert [costly for shape in every_shape() if (costly := too_costly(shape, 30_000))] == []


@pytest.mark.slow
def test_no_random_body_costs_more() -> None:
    sizes = itertools.cycle(SIZES)
    assert [costly for shape in random_shapes() if (costly := too_costly(shape, next(sizes)))] == []


@pytest.mark.parametrize("shape", [*WORST, BodyShape(CHAT, plain(60).decode()[:-3], "a", '"}]}')])
def test_the_largest_bodies_are_not_read_and_their_model_is_known(shape: BodyShape) -> None:
    """A body that may hold the loop for 20 ms is routed by load."""
    body = shape.body(LARGEST)
    seen = parse_request(shape.path, body)
    assert (seen.unread, seen.prompt, seen.model) == (COSTLY, b"", "m")
    assert LINE_NS * steps(lambda: parse_request(shape.path, body)) < 20_000_000


def test_a_model_after_a_long_text_is_known_even_if_the_body_is_not_read() -> None:
    body = b'{"messages":[{"role":"user","content":"' + b"a" * LARGEST + b'"}],"model":"sql"}'
    assert parse_request(CHAT, body).model == "sql"


ANSWERS = [
    ('{"choices":[{"index":0,"text":"x"}],"x":[', "1e-310,", "0]}"),
    ('{"choices":[', "[],", "[]]}"),
    ('{"choices":[', '{"index":0,"text":""},', "{}]}"),
    ('{"choices":[{"index":0,"text":"', "\\ud83d", '"}]}'),
    ("[", "[", "]"),
]


@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("size_bytes", [3_000, 900_000])
@pytest.mark.parametrize("streams", [True, False])
def test_no_answer_of_a_server_holds_the_loop(
    *, answer: tuple[str, str, str], size_bytes: int, streams: bool
) -> None:
    start, unit, end = answer
    data = (start + unit * (size_bytes // len(unit)) + end).encode()

    kind = "text/event-stream" if streams else "application/json"
    reader = ResponseReader(kind=ApiKind.COMPLETIONS, content_type=kind, content_encoding="")

    def once() -> None:
        reader.feed(b"data: " + data + b"\n\n" if streams else data, now=0.0)
        reader.finish()

    assert LINE_NS * steps(once) < 20_000_000


def peak_bytes(call: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        call()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


SMALL_OBJECTS_BYTES = 4_000_000
"""Room for small Python objects, which take more memory than the few bytes that they stand for. Bodies are
read one at a time, so this room counts once.
"""


@pytest.mark.parametrize("shape", WORST)
@pytest.mark.parametrize("size_bytes", [1_000_000, 4_000_000])
def test_a_body_takes_four_times_its_size_in_memory_at_most(shape: BodyShape, size_bytes: int) -> None:
    body = shape.body(size_bytes)
    assert len(body) + peak_bytes(lambda: read(shape.path, body)) < 4 * len(body) + SMALL_OBJECTS_BYTES


@pytest.mark.slow
def test_no_piece_at_any_place_of_a_body_takes_more_memory() -> None:
    for shape in every_shape():
        body = shape.body(1_000_000)
        peak = len(body) + peak_bytes(lambda: read(shape.path, body))  # noqa: B023 - called at once
        assert peak < 4 * len(body) + SMALL_OBJECTS_BYTES, shape


# Bodies of real clients are read.


def many_tool_calls(turns: int) -> bytes:
    """An agent's session: short calls, and results of a kilobyte."""
    call = '{"role":"assistant","content":null,"tool_calls":[{"id":"call_%d","type":"function","function":{"name":"read_file","arguments":"{\\"path\\":\\"src/main.py\\",\\"line\\":%d}"}}]}'
    answer = '{"role":"tool","tool_call_id":"call_%d","content":"' + "def f(x):\\n    return x\\n" * 40 + '"}'
    turns_text = ",".join(call % (n, n) + "," + answer % n for n in range(turns))
    return ('{"model":"m","messages":[' + turns_text + "]}").encode()


def many_tools(count: int) -> bytes:
    field = '"%s":{"type":"string","description":"What the tool should look at, in a few words."}'
    fields = ",".join(field % name for name in ("path", "query", "limit", "format", "language", "encoding"))
    tool = '{"type":"function","function":{"name":"tool_%d","description":"Does a thing.","parameters":{"type":"object","properties":{' + fields + '},"required":["path"]}}}'  # fmt: skip
    tools = ",".join(tool % n for n in range(count))
    return ('{"model":"m","tools":[' + tools + '],"messages":[{"role":"user","content":"hi"}]}').encode()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, many_tool_calls(20)),
        (CHAT, many_tool_calls(1000)),
        (CHAT, many_tools(10)),
        (CHAT, many_tools(1000)),
        (CHAT, plain(7_500_000)),
        (CHAT, b'{"model":"m","messages":[' + b'{"role":"user","content":"yes, do that"},' * 500 + b'{"role":"user"}]}'),
        (COMPLETIONS, b'{"model":"m","prompt":[' + b"12345, " * 200_000 + b"1]}"),
        ("/v1/embeddings", b'{"model":"m","input":[' + b'"a passage of text, some hundred letters long, as they are sent to be embedded, about this and that",' * 2048 + b'"end"]}'),
    ],
    ids=["calls", "many calls", "tools", "many tools", "7.5 MB", "short turns", "ids", "batch"],
)  # fmt: skip
def test_bodies_of_real_clients_are_read(path: str, body: bytes) -> None:
    assert read(path, body) == "read"
