"""Reads ext_proc's messages from protobuf's wire format without protobuf if they have the usual form. Also
writes the answer that lets a piece of a body pass unchanged.

A request has some fifteen headers, and routing reads only a few. Protobuf would make an object for each
header and for each piece of a streamed body. `_wire.c` steps over each field by its length and never
searches, so no value can look like another header. For every message of another form `_wire.c` returns None,
and protobuf decodes the message. If the picker was installed without a C compiler, protobuf reads and writes
every message, with the same results, but more slowly. Only `conversation` calls this module.
"""

from __future__ import annotations

from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc

try:
    from epp.extproc._wire import body_of, echo, echo_of, echoes_in, fields_of, headers_of
except ImportError:
    COMPILED = False

    def headers_of(
        _message: bytes | memoryview, _names: tuple[str, ...], /
    ) -> tuple[list[tuple[str, str]], bool, int] | None:
        return None

    def fields_of(_message: bytes | memoryview, _at: int, /) -> dict[int, bytes] | None:
        return None

    def body_of(_message: bytes | memoryview, /) -> tuple[int, int, bool, int] | None:
        return None

    def echo_of(_message: bytes | memoryview, _most_bytes: int, /) -> tuple[bytes, int] | None:
        return None

    def echoes_in(_most_bytes: int, _data: bytes, _at: int, _end: int, /) -> bytes | None:
        return None

    def echo(is_response: bool, data: bytes | memoryview, ends: bool, /) -> bytes:  # noqa: FBT001 - as in C
        response = ext_proc.ProcessingResponse()
        part = response.response_body if is_response else response.request_body
        streamed = part.response.body_mutation.streamed_response
        streamed.SetInParent()
        streamed.body = bytes(data)
        streamed.end_of_stream = ends
        return bytes(response.SerializeToString())
else:
    COMPILED = True

__all__ = ["COMPILED", "body_of", "echo", "echo_of", "echoes_in", "fields_of", "headers_of"]
