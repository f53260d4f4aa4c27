"""Feeds generated input to a build of `_jsontext.c` that checks each access to memory.
A process of its own: the sanitizer ends it.

`python -m tests.harness.sanitized_jsontext EXTENSION SEED MEGABYTES`. Input lies in buffers of exactly its
size, since a byte beyond them must not be there; whole bodies, damaged ones and cut ones, and long runs of
what the vector code looks for.
"""

from __future__ import annotations

import ctypes
import importlib.util
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from tests.harness.hostile_bodies import Shape, every_shape

_TOKENS = (
    *(b'"', b"\\", b'\\"', b"\\\\", b"\\u", b"\\ud83d", b"\\ude00", b"\\u00e9", b"\\uD8", b"\x00", b"\x1f", b"\xff"),
    *(b"\xc3", b"\xe4\xb8", b"\xf0\x9f\x98\x80", b"[", b"]", b"{", b"}", b",", b":", b" ", b"0", b"4294967296", b"-1"),
    *(b'"model":', b'"messages":[', b'"content":', b'"tool_calls":', b"a" * 15, b"a" * 16, b"a" * 17, b"1," * 40),
    *(b'{"model":"m","messages":[', b'{"role":"user","content":"', b'"},', b'"}]}', b'"stream":true,', b'"n":1.5', b"tru"),
)  # fmt: skip


def load(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location("epp.request._jsontext", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def inputs(rng: random.Random) -> Iterator[bytes]:
    """Without end."""
    shapes: list[Shape] = list(every_shape())
    while True:
        body = rng.choice(shapes).body(rng.choice((40, 80, 200, 600)))
        yield body
        yield body[: rng.randrange(len(body) + 1)]
        for _ in range(4):
            at = rng.randrange(len(body) + 1)
            body = body[:at] + rng.choice(_TOKENS) + body[at + rng.randrange(3) :]
            yield body
        made = b"".join(rng.choice(_TOKENS) for _ in range(rng.randrange(12)))
        yield from (made, b'"' + made + b'"', b"[" + made + b"]", rng.randbytes(rng.randrange(40)))


_LIBC = ctypes.CDLL(None)
_LIBC.malloc.restype = ctypes.c_void_p
_LIBC.malloc.argtypes = (ctypes.c_size_t,)
_LIBC.free.argtypes = (ctypes.c_void_p,)


@contextmanager
def exactly(data: bytes) -> Iterator[ctypes.Array[ctypes.c_char]]:
    """A buffer without a byte to spare: Python's own have some, and what is there may be read unnoticed."""
    address = _LIBC.malloc(len(data))
    try:
        ctypes.memmove(address, data, len(data))
        yield (ctypes.c_char * len(data)).from_address(address)
    finally:
        _LIBC.free(address)


def run(module: ModuleType, *, seed: int, size_bytes: int) -> int:
    """How many inputs it took to reach so many bytes."""
    rng, fed = random.Random(seed), 0
    for number, data in enumerate(inputs(rng)):
        with exactly(data) as exact:
            module.text_of(exact)
            module.ids_of(exact)
            module.plain_chat(exact)
            module.weigh(exact, rng.choice((0, 5, 2**62)))
        fed += len(data)
        if fed >= size_bytes:
            return number + 1
    raise AssertionError("the inputs do not end")


if __name__ == "__main__":
    count = run(load(sys.argv[1]), seed=int(sys.argv[2]), size_bytes=int(float(sys.argv[3]) * 1e6))
    print(f"{count} inputs")
