"""Bodies with which tests search for the most CPU and memory that one byte can cause. Each body repeats a
piece of JSON at one place.

`WORST` are the most expensive ones, now or in the past. Each is a case of the tests. `shapes` makes more of
them at random.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

CHAT, COMPLETIONS, RESPONSES, EMBEDDINGS, MESSAGES, OTHER = PATHS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/embeddings",
    "/v1/messages",
    "/v1/rerank",
)

_PLACES: Final = {
    CHAT: (
        ('{"model":"m","messages":[', '{"role":"user"}]}'),
        ('{"model":"m","messages":[{"role":"user","content":[', '{"text":""}]}]}'),
        ('{"model":"m","messages":[{"role":"user","content":["",', '{"text":""}]}]}'),
        ('{"model":"m","messages":[{"role":"\\ud800","content":"', '"}]}'),
        ('{"model":"m","messages":[{"role":"user","content":"', ""),
        ('{"model":"m","messages":[{"role":"user","content":[{"type":"x","x":[', "0]}]}]}"),
        ('{"model":"m","messages":[{"role":"user","content":[{"type":"x",', '"z":0}]}]}'),
        ('{"model":"m","messages":[{"role":"user","content":[{"type":"tool_result","content":[', '""]}]}]}'),
        ('{"model":"m","messages":[{"role":"user","content":[{"type":"tool_use","input":[', "0]}]}]}"),
        ('{"model":"m","messages":[{"role":"user","content":"', '"}]}'),
        ('{"model":"m","messages":[{"role":"user","tool_calls":[', "0]}]}"),
        ('{"model":"m","messages":[{', '"role":"user"}]}'),
        ('{"model":"m","messages":[{"role":"user","content":"hi"}],"tools":[', "0]}"),
        ('{"model":"m","messages":[{"role":"user","content":"hi"}],"metadata":{', '"z":0}}'),
        ('{"model":"m","messages":[{"role":"user","content":"hi"}],', '"z":0}'),
        ('{"messages":[{"role":"user","content":"hi"}],"documents":[', '0],"model":"m"}'),
        ('{"m\\u0065ssages":[', '{"role":"user"}],"model":"m"}'),
        ('{"messages":[{"role":"user","content":"hi"}],"model":"', '"}'),
    ),
    COMPLETIONS: (
        ('{"model":"m","prompt":[', "0]}"),
        ('{"model":"m","prompt":[', '""]}'),
        ('{"model":"m","prompt":["",', '""]}'),
        ('{"model":"m","prompt":[[],', "[0]]}"),
        ('{"model":"m","prompt":[', "[0]]}"),
        ('{"model":"m","prompt":[[', "0]]}"),
        ('{"model":"m","prompt":"', '"}'),
        ('{"model":"m","prompt":"x","user":"', '"}'),
        ('{"model":"m","prompt":"x",', '"z":0}'),
    ),
    RESPONSES: (
        ('{"model":"m","input":[', '{"role":"user","content":"x"}]}'),
        ('{"model":"m","input":[{"type":"x","x":[', "0]}]}"),
        ('{"model":"m","input":[{"type":"x",', '"z":0}]}'),
        ('{"model":"m","input":[{"role":"user","content":[', '""]}]}'),
        ('{"model":"m","input":"x","instructions":"', '"}'),
    ),
    EMBEDDINGS: (
        ('{"model":"m","input":[', "0]}"),
        ('{"model":"m","input":[', '""]}'),
        ('{"model":"m","input":[', "[0]]}"),
    ),
    MESSAGES: (
        ('{"model":"m","messages":[{"role":"user","content":"x"}],"system":[', '""]}'),
        ('{"model":"m","messages":[{"role":"user","content":[{"type":"tool_result","content":[', '""]}]}]}'),
        ('{"model":"m","messages":[{"role":"user","content":[{"type":"tool_use","input":{', '"z":0}}]}]}'),
    ),
    OTHER: (
        ('{"model":"m","documents":[', "0]}"),
        ('{"documents":"', '","model":"m"}'),
        ("{", '"z":0}'),
    ),
}  # fmt: skip

_ATOMS: Final = (
    '""', '"a"', '"\\n"', '"\\u00e9"', '"\\ud83d\\ude00"', '"\\ud83d"', '"é"', '"中"', '"😀"',
    "0", "1", "-1", "12345", "4294967295", "1e-310", "0.1e-300", "1.5", "9" * 40, "true", "null",
    "[]", "{}", "[[]]", '{"":0}', '{"type":""}', '{"type":"text","text":""}', '{"text":""}', '{"role":""}',
    '{"role":"user","content":""}', '{"role":"user","content":[]}', '{"role":"a","name":"b","tool_call_id":"c"}',
    '{"type":"thinking"}', '{"type":"tool_use"}', '{"type":"tool_result","content":[]}', '{"type":"image_url"}',
    '{"type":"tool_result","content":[{"text":""}]}', '{"type":"x","b":0,"a":0}', '{"type":"function_call"}',
    '{"type":"function_call_output","output":[""]}', '{"role":"user","content":[""]}', '{"role":"user","tool_calls":[0]}',
)  # fmt: skip
_KEYS: Final = (
    '"":0', '"a":0', '"a":""', '"type":""', '"text":""', '"role":""', '"content":[]', '"content":""', '"name":""', '"model":""',
    '"stream":true', '"max_tokens":1', '"max_tokens":"1"', '"cache_salt":""', '"prompt":""', '"tools":[]', '"input":[]',
    '"messages":[]', '"messages":[{"role":""}]', '"stream_options":{}', '"x":1e-310', '"N":[]', '"N":0', '"N":""',
)  # fmt: skip
_LETTERS: Final = (
    "a",
    "é",
    "中",
    "😀",
    "\\n",
    "\\u00e9",
    "\\ud83d\\ude00",
    "\\ud83d",
    "\\\\",
    '\\"',
    "a\\n",
    "é\\n",
    "a" * 30 + "\\n",
)


@dataclass(frozen=True)
class BodyShape:
    path: str
    start: str
    unit: str
    """The piece that is repeated. `N` stands for a name that differs each time."""
    end: str

    def body(self, size_bytes: int) -> bytes:
        """Return a body of about this size."""
        length = len(self.unit.encode())
        count = max(1, (size_bytes - len(self.start) - len(self.end)) // length)
        if '"N"' in self.unit:
            middle = "".join(
                self.unit.replace('"N"', f'"{n:x}"') for n in range(count * length // (length + 4))
            )
        else:
            middle = self.unit * count
        return (self.start + middle + self.end).encode()


def _in_object(start: str) -> bool:
    """Tell whether a key comes next."""
    return start.endswith("{") or (
        start.endswith(",") and start.rindex("{") > start.rindex("[") if "[" in start else True
    )


def plain(size_bytes: int) -> bytes:
    """Return a chat of plain text of this size. All other bodies are compared with it."""
    return BodyShape(
        CHAT, '{"model":"m","messages":[{"role":"user","content":"', "tell me about foxes ", '"}]}'
    ).body(size_bytes)


def shapes(rng: random.Random) -> Iterator[BodyShape]:
    """Yield shapes without end: a random place, and a unit of one to three pieces that may stand there."""
    while True:
        path = rng.choice(PATHS)
        start, end = rng.choice(_PLACES[path])
        in_string = start.endswith('"')
        in_object = _in_object(start)
        choices = _LETTERS if in_string else _KEYS if in_object else _ATOMS
        pieces = [rng.choice(choices) for _ in range(rng.choice((1, 1, 1, 2, 3)))]
        unit = (
            "".join(pieces)
            if in_string
            else "".join(f"{piece}{rng.choice(('', '', ' '))}," for piece in pieces)
        )
        yield BodyShape(path, start, unit, end)


def every_shape() -> Iterator[BodyShape]:
    """Return a shape for each single piece in each place."""
    for path, places in _PLACES.items():
        for start, end in places:
            choices = _LETTERS if start.endswith('"') else _KEYS if _in_object(start) else _ATOMS
            for piece in choices:
                yield BodyShape(path, start, piece if start.endswith('"') else f"{piece},", end)
