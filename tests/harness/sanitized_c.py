"""Feeds generated input to a build of a part in C that checks each access to memory. It is a process of its
own, because the sanitizer ends the process.

`python -m tests.harness.sanitized_c EXTENSION SEED MEGABYTES`, of `_jsontext.c`, `_wire.c` or `_chain.c`.
Input lies in buffers of exactly its size, so that reading a byte beyond it is noticed. Inputs are whole,
damaged and cut bodies and messages, and long runs of the characters that the vector code looks for.
"""

import ctypes
import importlib.util
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.harness.hostile_bodies import BodyShape, every_shape

_TOKENS = (
    *(b'"', b"\\", b'\\"', b"\\\\", b"\\u", b"\\ud83d", b"\\ude00", b"\\u00e9", b"\\uD8", b"\x00", b"\x1f", b"\xff"),
    *(b"\xc3", b"\xe4\xb8", b"\xf0\x9f\x98\x80", b"[", b"]", b"{", b"}", b",", b":", b" ", b"0", b"4294967296", b"-1"),
    *(b'"model":', b'"messages":[', b'"content":', b'"tool_calls":', b"a" * 15, b"a" * 16, b"a" * 17, b"1," * 40),
    *(b'{"model":"m","messages":[', b'{"role":"user","content":"', b'"},', b'"}]}', b'"stream":true,', b'"n":1.5', b"tru"),
)  # fmt: skip


_WIRE_TOKENS = (
    *(b"\x0a", b"\x12", b"\x1a", b"\x22", b"\x2a", b"\x42", b"\x4a", b"\x5a", b"\x10\x01", b"\x18\x01", b"\x80", b"\xff"),
    *(b"\x00", b"\x01", b"\x02", b"\x05", b"\x7f", b"\xff\xff\xff\xff\x0f", b"\x80\x80\x80\x80\x80\x01", b":path", b"A", b"\xc3\xa9"),
)  # fmt: skip
_WIRE_NAMES = (":path", "x-request-id", "content-length")


def load(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def inputs(rng: random.Random) -> Iterator[bytes]:
    """Yield inputs without end."""
    shapes: list[BodyShape] = list(every_shape())
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


def messages(rng: random.Random) -> Iterator[bytes]:
    """Yield messages of the data plane without end."""
    while True:
        value = rng.choice((b"", b"v" * 5, b"v" * 127, b"v" * 128, b"v" * 300))
        headers = [part(1, part(1, rng.choice((b":path", b"accept", b"")))) for _ in range(rng.randrange(3))]
        headers.append(part(1, part(1, b"x-request-id") + part(3, value)))
        whole = rng.choice(
            (
                part(rng.choice((2, 3)), part(1, b"".join(headers)) + rng.choice((b"", b"\x18\x01"))),
                part(rng.choice((4, 5)), part(1, value) + rng.choice((b"", b"\x10\x00", b"\x10\x01"))),
            )
        )
        whole += rng.choice((b"", part(8, value), part(9, b"") + part(11, b"\x08\x04")))
        yield whole
        yield whole[: rng.randrange(len(whole) + 1)]
        for _ in range(4):
            at = rng.randrange(len(whole) + 1)
            whole = whole[:at] + rng.choice(_WIRE_TOKENS) + whole[at + rng.randrange(3) :]
            yield whole
        yield b"".join(rng.choice(_WIRE_TOKENS) for _ in range(rng.randrange(12)))


def part(number: int, content: bytes) -> bytes:
    """Return a field of protobuf."""
    size = len(content)
    length = bytes((size,)) if size < 0x80 else bytes((size & 0x7F | 0x80, size >> 7))
    return bytes((number << 3 | 2,)) + length + content


_LIBC = ctypes.CDLL(None)
_LIBC.malloc.restype = ctypes.c_void_p
_LIBC.malloc.argtypes = (ctypes.c_size_t,)
_LIBC.free.argtypes = (ctypes.c_void_p,)


@contextmanager
def exactly(data: bytes) -> Iterator[ctypes.Array[ctypes.c_char]]:
    """Copy into a buffer without spare bytes. Python's own buffers have some, and reading them might not
    be noticed.
    """
    address = _LIBC.malloc(len(data))
    try:
        ctypes.memmove(address, data, len(data))
        yield (ctypes.c_char * len(data)).from_address(address)
    finally:
        _LIBC.free(address)


def read_body(module: ModuleType, data: Any, rng: random.Random) -> None:
    module.text_of(data)
    module.plain_messages(memoryview(data)[max(0, bytes(data).find(b"[")) :], rng.choice((0, 9, 2**62)))
    module.weigh(data, rng.choice((0, 5, 2**62)), rng.choice(((), ("model", "input"))))


def read_message(module: ModuleType, data: Any, rng: random.Random) -> None:
    module.headers_of(data, _WIRE_NAMES)
    module.body_of(data)
    framed, cut = b"\0" + len(data).to_bytes(4) + bytes(data), rng.randrange(len(data) + 6)
    module.echoes_in(62_000, framed * 2, 0, 2 * len(framed))
    module.echoes_in(62_000, framed[:cut], rng.choice((0, 1)), rng.choice((cut, cut + 1)))
    module.echo(rng.random() < 0.5, data, rng.random() < 0.5)


def prompts(rng: random.Random) -> Iterator[bytes]:
    """Yield prompts of few chunks without end."""
    while True:
        yield rng.randbytes(rng.randrange(4000))


def hash_prompt(module: ModuleType, data: Any, rng: random.Random) -> None:
    """Hash chunks that reach to the end, and some that would go on beyond the end."""
    size, later = rng.choice((241, 256, 1024, 1025, 2048)), max(241, len(data) // 2)
    for wanted in (
        (size, len(data) // size, later, 0),
        (max(241, len(data)), 0, later, 2),
        (size, 9, later, 1),
    ):
        with suppress(ValueError):
            module.chain_of(data, rng.getrandbits(64), *wanted)


_KINDS = {"_wire": (messages, read_message), "_chain": (prompts, hash_prompt)}


def run(module: ModuleType, *, seed: int, size_bytes: int) -> int:
    """Feed inputs until so many bytes are reached. Return the number of inputs."""
    rng, fed = random.Random(seed), 0
    made, read = _KINDS.get(module.__name__, (inputs, read_body))
    for number, data in enumerate(made(rng)):
        with exactly(data) as exact:
            read(module, exact, rng)
        fed += len(data)
        if fed >= size_bytes:
            return number + 1
    raise AssertionError("the inputs do not end")


if __name__ == "__main__":
    count = run(load(sys.argv[1]), seed=int(sys.argv[2]), size_bytes=int(float(sys.argv[3]) * 1e6))
    print(f"{count} inputs")
