"""The transport of a connection that has no socket."""

import asyncio


class Pipe(asyncio.Transport):
    """Keeps each write, and notes whether its owner reads and whether it is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.reads = True
        self.closed = False

    @property
    def written(self) -> bytes:
        return b"".join(self.writes)

    def write(self, chunk: bytes | bytearray | memoryview) -> None:
        self.writes.append(bytes(chunk))

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    abort = close

    def can_write_eof(self) -> bool:
        return False

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...

    def pause_reading(self) -> None:
        self.reads = False

    def resume_reading(self) -> None:
        self.reads = True
