"""The requirements for an endpoint picker, row by row. Names of tests contain the numbers of these rows.

The table at the end of a run uses this list, and so does the test that every row has tests.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal

Level = Literal["must", "should", "security", "users", "data plane", "test flag", "reliability"]


@dataclass(frozen=True, slots=True)
class Row:
    level: Level
    text: str


ROWS: Final[dict[int, Row]] = {
    1: Row("must", "every body mode of ext_proc, full duplex above all"),
    2: Row("must", "full duplex: answers in order, bodies back byte for byte in small pieces"),
    3: Row("must", "only endpoints of the subset hint are named"),
    4: Row("must", "the pick in a header and in the metadata, equal"),
    5: Row("must", "a list of ip:port, with more than one address if there are more endpoints"),
    6: Row("must", "503 without an endpoint, 429 with Retry-After when shedding"),
    7: Row("data plane", "books the server that really served"),
    8: Row("must", "gRPC health by name, Watch, and a drain in the right order"),
    9: Row("should", "reads the metrics of vLLM, SGLang and llm-d-inference-sim"),
    10: Row("test flag", "conformance headers, only when switched on"),
    11: Row("security", "a client can never choose its server"),
    12: Row("users", "errors in the format that OpenAI's clients read"),
    13: Row("users", "a request that the picker does not understand is routed all the same"),
    14: Row("reliability", "a picker that dies or drains cuts no answer"),
    15: Row("must", "headers of several values, in any case, `:status` by its name"),
    16: Row("users", "x-request-id kept or made, and in the decision"),
    17: Row("must", "however a body is cut, the pick is the same"),
    18: Row("should", "scores in the metadata, behind a flag"),
    19: Row("users", "an unknown model gets 404, all models are listed, an alias is sent on as its target"),
    20: Row(
        "security",
        "the picker, and never a client, names the server that computes a prompt for a decode server",
    ),
}

_NAME: Final = re.compile(r"test_row_(\d\d)_")


def row_of(name: str) -> int | None:
    """Return the row that a test belongs to, from its name or node id."""
    found = _NAME.search(name)
    return int(found[1]) if found else None
