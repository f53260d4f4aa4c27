"""Inputs made from valid examples: bytes changed, cut, repeated, nested, and spliced from several of them."""

import random
from collections.abc import Callable, Sequence

MOST_BYTES = 20_000
_NEAR_THE_START = 0.2
_USUAL = (
    *(b"\x00", b"\xff", b"\xed\xa0\x80", b"\xf0\x9f\x98\x80", b"\r\n", b"\n\n", b"%00", b"../", b"\\u0000"),
    *(
        b"0",
        b"-1",
        b"1e999",
        b"NaN",
        b"inf",
        b"9" * 20,
        b"9" * 400,
        b"18446744073709551616",
        b"-9223372036854775809",
    ),
    *b'null true "" [] {} \''.split(),
    b"!!bool x",
    b"!!int ''",
    b"&a [*a]",
    b"<<: {}",
    b"? ",
    b"- ",
    *(
        b"\x91",
        b"\x81",
        b"\xc0",
        b"\xc1",
        b"\xcf" + b"\xff" * 8,
        b"\xd3\x80" + bytes(7),
        b"\xcb\x7f\xf8" + bytes(6),
        b"\xdd" + b"\xff" * 4,
    ),
)
_OPENERS = (b"[", b"{", b'{"a":', b"\x91", b"\x81\xa1a", b"- ", b"\x0a\x02")


def mutants(
    rng: random.Random, seeds: Sequence[bytes], *, words: Sequence[bytes] = ()
) -> Callable[[], bytes]:
    """Return a function that makes inputs. `words` are pieces that have a meaning at this entry."""
    pieces = (*_USUAL, *words, *words)

    def made() -> bytes:
        data = bytearray(rng.choice(seeds))
        for _ in range(rng.choice((0, 1, 1, 1, 2, 3, 8))):
            _change(rng, data, seeds, pieces)
        return bytes(data[:MOST_BYTES])

    return made


def _change(rng: random.Random, data: bytearray, seeds: Sequence[bytes], pieces: Sequence[bytes]) -> None:
    at = rng.randrange(min(len(data), 12) + 1 if rng.random() < _NEAR_THE_START else len(data) + 1)
    end = min(len(data), at + rng.choice((0, 1, 1, 2, 4, 16, 64)))
    match rng.randrange(8):
        case 0 if at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        case 1 if at < len(data):
            data[at] = rng.randrange(256)
        case 2:
            del data[at:end]
        case 3:
            data[at:end] = rng.choice(pieces)
        case 4:
            data[at:at] = bytes(data[at:end]) * rng.choice((1, 2, 50))
        case 5:
            other = rng.choice(seeds)
            start = rng.randrange(len(other) + 1)
            data[at:] = other[start:]
        case 6:
            data[at:at] = rng.choice(_OPENERS) * rng.choice((1, 3, 100, 3_000))
        case _:
            data[at:at] = rng.randbytes(rng.choice((1, 4, 40)))
