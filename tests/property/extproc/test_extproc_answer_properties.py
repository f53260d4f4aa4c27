"""An answer is written as protobuf writes it, whatever servers it names and whatever came before it."""

from envoy.config.core.v3 import base_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc
from hypothesis import given
from hypothesis import strategies as st

from epp.protocol.codec import encode
from epp.protocol.header_names import DESTINATION, RESERVED
from epp.protocol.http_events import Answer, Slot

_ADDRESSES = st.one_of(
    st.ip_addresses(v=4).map(lambda ip: f"{ip}:8000"), st.ip_addresses(v=6).map(lambda ip: f"[{ip}]:1")
)
_SERVERS = st.one_of(st.lists(_ADDRESSES, max_size=12).map(",".join), st.text("a\0é", max_size=9))


def _by_protobuf(answer: Answer) -> ext_proc.ProcessingResponse:
    response = ext_proc.ProcessingResponse()
    part = getattr(response, answer.slot.value)
    part.SetInParent()
    for name, value in answer.set_headers:
        option = part.response.header_mutation.set_headers.add()
        option.append_action = base_pb2.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
        option.header.key, option.header.raw_value = name, value.encode("latin-1")
    part.response.header_mutation.remove_headers.extend(answer.remove_headers)
    part.response.clear_route_cache = bool(answer.destination and answer.set_headers)
    if answer.destination:
        named = response.dynamic_metadata.fields["envoy.lb"].struct_value.fields[DESTINATION]
        named.string_value = answer.destination
    return response


@given(
    st.sampled_from([Slot.REQUEST_HEADERS, Slot.REQUEST_BODY]),
    st.lists(_SERVERS, min_size=1, max_size=4),
    st.lists(st.sampled_from(RESERVED), max_size=2, unique=True).map(tuple),
    st.sampled_from(["the same servers", "other servers", "no servers"]),
    st.booleans(),
)
def test_an_answer_has_the_bytes_that_protobuf_writes(
    slot: Slot,
    lists: list[str],
    removed: tuple[str, ...],
    in_header: str,
    streamed: bool,  # noqa: FBT001 - Hypothesis gives it
) -> None:
    for servers in lists:
        named = {"the same servers": servers, "other servers": f"{servers},1.2.3.4:5", "no servers": ""}
        answer = Answer(
            slot,
            set_headers=((DESTINATION, named[in_header]),) if named[in_header] else (),
            remove_headers=removed,
            destination=servers,
            stream_response=streamed,
        )
        written, expected = ext_proc.ProcessingResponse.FromString(encode(answer)), _by_protobuf(answer)
        assert written.dynamic_metadata == expected.dynamic_metadata
        assert written.HasField("mode_override") == streamed
        part, wanted = getattr(written, slot.value), getattr(expected, slot.value)
        assert written.WhichOneof("response") == slot.value
        assert part.response.header_mutation == wanted.response.header_mutation
        assert part.response.clear_route_cache == wanted.response.clear_route_cache
