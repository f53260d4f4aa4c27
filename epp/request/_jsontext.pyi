from typing import TypeAlias

from msgspec import Raw

_Json: TypeAlias = bytes | memoryview | Raw

def text_of(json: _Json, /) -> bytes | None: ...
def plain_messages(json: _Json, most: int, /) -> tuple[bytes | None, int]: ...
def weigh(
    json: _Json, limit: int, names: tuple[str, ...], /
) -> tuple[tuple[int, int, int, int], list[tuple[int, int]]]: ...
