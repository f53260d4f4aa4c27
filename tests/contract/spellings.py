"""Other ways to write a path, for tests that no spelling of a blocked path gets through. `single` gives each
disguise of a path once. `combined` stacks several disguises, drawn by a seeded generator.
"""

import random
from collections.abc import Callable, Iterator
from typing import Final

Disguise = Callable[[str, random.Random], str]


def _encoded(text: str, rng: random.Random) -> str:
    """Return texts with some characters percent-encoded, in both cases of hex."""
    form = rng.choice(("%{:02x}", "%{:02X}"))
    return "".join(form.format(ord(c)) if c != "/" and rng.random() < 0.5 else c for c in text)


def _all_encoded(text: str, _: random.Random) -> str:
    return "/" + "".join(f"%{ord(c):02x}" for c in text[1:])


def _some_segment(insert: str) -> Disguise:
    def disguise(text: str, rng: random.Random) -> str:
        slashes = [i for i, c in enumerate(text) if c == "/"]
        place = rng.choice(slashes) if slashes else 0
        return text[:place] + insert + text[place:]

    return disguise


def _ending(suffix: str) -> Disguise:
    return lambda text, _: text + suffix


def _beginning(prefix: str) -> Disguise:
    return lambda text, _: prefix + text


def _in_segment(suffix: str) -> Disguise:
    """Put the suffix at the end of the first segment."""

    def disguise(text: str, _: random.Random) -> str:
        end = text.find("/", 1)
        return text + suffix if end < 0 else text[:end] + suffix + text[end:]

    return disguise


DISGUISES: Final[tuple[Disguise, ...]] = (
    *map(_ending, ("X", ".json", ";a=b", "%20", "%0a", "%00", "%09", "%3fa=b", "%23x", "/", "/x", "//", "/.", "?a=b", "%2f", "%2F..%2Fx", "/x/..", "\\", "%5c")),
    *map(_beginning, ("/", "//", "/.", "/x/..", "/%2e", "/x/%2e%2E", "/v1/..%2f..", "/%2f", "/x//../..", "/..", "/%5c..", "http://gateway", "/x\\..")),
    *map(_some_segment, ("/", "/.", "/%2e", "/x/..", "/x//../..", "/x%2f%2e%2e", "/%2e%2e%2fx/..", "//..//x/..")),
    *map(_in_segment, (";a=b", ";", "%20", "%09", "%3b")),
    _encoded,
    _all_encoded,
    lambda text, _: text.upper(),
    lambda text, _: text.title(),
    lambda text, _: text.replace("%", "%25"),
    lambda text, _: text.replace("/", "%2f"),
    lambda text, _: "/" + text[1:].replace("/", "\\"),
)  # fmt: skip


def single(path: str) -> Iterator[str]:
    """Return the path as it is, and under each disguise alone."""
    rng = random.Random(path)
    yield path
    for disguise in DISGUISES:
        yield disguise(path, rng)


def combined(path: str, *, count: int, seed: int) -> Iterator[str]:
    """Return `count` stacks of two to four disguises."""
    rng = random.Random(f"{path} {seed}")
    for _ in range(count):
        text = path
        for disguise in rng.choices(DISGUISES, k=rng.randint(2, 4)):
            text = disguise(text, rng)
        yield text
