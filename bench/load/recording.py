"""Writes the sent requests as a trace in Mooncake's format, for `epp replay`. Each process of the generator
writes one file.

Four bytes of the messages' text count as a token. Blocks of 512 tokens are named by a chained hash, so no
text is written. `locust_run` calls it for each answer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

from bench.load.trace import BLOCK_TOKENS

_TOKEN_BYTES: Final = 4
_BLOCK_BYTES: Final = BLOCK_TOKENS * _TOKEN_BYTES
_ID_BITS: Final = 62


class TraceFile:
    def __init__(self, path: Path, *, salt: str) -> None:
        self._file = path.open("w")
        self._salt = salt.encode()

    def note(self, body: dict[str, Any], *, output_tokens: int, began_unix_s: float) -> None:
        """Write one answered request."""
        text = "\0".join(f"{m['role']}\0{m['content']}" for m in body["messages"]).encode()
        row = {
            "timestamp": round(began_unix_s * 1000),
            "input_length": -(-len(text) // _TOKEN_BYTES),
            "output_length": output_tokens,
            "hash_ids": list(self._blocks(text)),
        }
        self._file.write(f"{json.dumps(row)}\n")

    def close(self) -> None:
        self._file.close()

    def _blocks(self, text: bytes) -> Iterator[int]:
        name = self._salt
        for start in range(0, len(text), _BLOCK_BYTES):
            name = blake2b(name + text[start : start + _BLOCK_BYTES], digest_size=8).digest()
            yield int.from_bytes(name, "little") >> (64 - _ID_BITS)
