"""Checks that any picker has to pass, row by row, with a gateway of any dialect. A check fails with an
AssertionError that says what the picker did.

The rows are those of docs/protocol.md. Checks that start, stop or steer a picker are not possible with only
an address. The project's own tests make these checks with our picker.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from epp.base.types import Address
from epp.config.dialects import DIALECTS, DialectName
from epp.tools.conformance import dataplane
from epp.tools.conformance.dataplane import (
    DESTINATION,
    MAX_PIECE_BYTES,
    MODES,
    PATIENCE_S,
    SENDS_SUBSETS,
    Immediate,
    Mode,
    StreamExchange,
)

NOWHERE: Final = "203.0.113.7:8000"
_CHAT: Final = "/v1/chat/completions"
_NOBODYS: Final = "conformance/nobody-has-this-model"
_OBEYED: Final = ("x-prefiller-host-port", "x-prefiller-url", "x-data-parallel-host-port")
"""Headers from which a server learns which address to call."""


@dataclass(slots=True)
class PickerUnderTest:
    """The picker under test. `endpoints` are the `ip:port` of all endpoints that the picker may choose from,
    ready and idle.
    """

    channel: grpc.aio.Channel
    dialect: DialectName
    endpoints: Sequence[str]
    model: str = "m"
    """The model that the requests name."""
    knows_models: bool = False
    """True if the picker knows the models of every endpoint, with `model` among them."""
    alias: tuple[str, str] | None = None
    """A name that the picker replaces, and the new name."""
    prefillers: Sequence[str] = ()
    """The `ip:port` of endpoints that compute prompts for others."""

    @property
    def mode(self) -> Mode:
        return MODES[self.dialect]

    @property
    def reads_list(self) -> bool:
        return DIALECTS[self.dialect].reads_list

    async def route(self, body: Any, *, answered: bool = True, **request: Any) -> StreamExchange:
        """Send one request from start to end. The picked endpoint answers it with 200. Raise AssertionError
        if no gateway could use the pick.
        """
        async with dataplane.exchange(self.channel, mode=self.mode) as exchange:
            await exchange.send(body, **request)
            if exchange.immediate is None and answered and not self.mode.bare:
                await exchange.respond(b'{"choices": []}' if self.mode.response else None)
                status = await exchange.finish()
                assert status is grpc.StatusCode.OK, f"the stream ended with {status}"
            return exchange

    async def health(self, service: str) -> int:
        request = health_pb2.HealthCheckRequest(service=service)
        answer = await health_pb2_grpc.HealthStub(self.channel).Check(request, timeout=PATIENCE_S)
        return int(answer.status)


class NotAskedError(Exception):
    """The check has no meaning for this dialect or picker. The message says why."""


@dataclass(frozen=True, slots=True)
class Check:
    row: int
    claim: str
    run: Callable[[PickerUnderTest], Awaitable[None]]


async def _a_request_is_routed(target: PickerUnderTest) -> None:
    for body in (_completion(target), None):
        routed = await target.route(body, method="POST" if body else "GET")
        assert set(routed.destinations) <= set(target.endpoints), (
            f"the pick names {routed.destinations}, but the endpoints are {list(target.endpoints)}"
        )


async def _the_body_comes_back(target: PickerUnderTest) -> None:
    _needs_duplex(target)
    body = _completion(target, "back again " * 30_000)
    pieces = [body[start : start + 50_000] for start in range(0, len(body), 50_000)]
    routed = await target.route(pieces)
    assert routed.request.body == body, "the body that came back differs from the body that was sent"
    longest = max(map(len, routed.request.pieces))
    assert longest <= MAX_PIECE_BYTES, f"a piece of {longest} bytes came back; {MAX_PIECE_BYTES} is the most"
    assert routed.request.ends.count(True) == 1, "one piece has to end the body"
    assert routed.request.order[0] == "headers", f"the answers came as {routed.request.order}"


async def _trailers_are_answered_last(target: PickerUnderTest) -> None:
    _needs_duplex(target)
    routed = await target.route(_completion(target), trailers=True)
    order = routed.request.order
    assert (order[0], order[-1]) == ("headers", "trailers"), f"the answers came as {order}"
    assert routed.request.body == _completion(target), (
        "the body that came back differs from the body that was sent"
    )


async def _the_subset_binds(target: PickerUnderTest) -> None:
    _needs_subsets(target)
    for allowed in (target.endpoints[:1], target.endpoints[1:]):
        for hint in (list(allowed), ",".join(allowed)):
            for body in (_completion(target), None):
                routed = await target.route(body, subset=hint)
                assert set(routed.destinations) <= set(allowed), (
                    f"the hint {hint!r} allows {list(allowed)}, but the pick names {routed.destinations}"
                )


async def _the_port_counts(target: PickerUnderTest) -> None:
    _needs_subsets(target)
    host = target.endpoints[0].rpartition(":")[0]
    _not_asked("port 1 is one of the endpoints", where=f"{host}:1" in target.endpoints)
    refused = (await target.route(_completion(target), subset=[f"{host}:1"])).refused
    assert refused.status == 503, f"a port where nobody listens was answered with {refused.status}"


async def _nobody_eligible_is_503(target: PickerUnderTest) -> None:
    _needs_subsets(target)
    for body in (_completion(target), None):
        refused = (await target.route(body, subset=[NOWHERE])).refused
        assert refused.status == 503, f"no endpoint was eligible, and the status was {refused.status}"


async def _header_and_metadata_are_equal(target: PickerUnderTest) -> None:
    _not_asked("this gateway reads no metadata", where=target.mode.bare)
    routed = await target.route(_completion(target))
    assert routed.metadata_destination == routed.destination, (
        f"the header says {routed.destination}, the metadata {routed.metadata_destination}"
    )


async def _as_many_destinations_as_are_read(target: PickerUnderTest) -> None:
    named = (await target.route(_completion(target))).destinations
    assert len(set(named)) == len(named), f"a destination is named twice: {named}"
    for each in named:
        Address.parse(each)
    if target.reads_list:
        assert len(named) >= 2, f"{named} has no fallback for a dead endpoint"
    else:
        assert len(named) == 1, f"{named}: this gateway reads the value as one address"


async def _health_has_its_names(target: PickerUnderTest) -> None:
    serving = health_pb2.HealthCheckResponse.SERVING
    for name in ("", "liveness", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor"):
        status = await target.health(name)
        assert status == serving, f"health of {name!r} is {status}"


async def _a_client_does_not_name_its_server(target: PickerUnderTest) -> None:
    routed = await target.route(_completion(target), headers=[(DESTINATION, NOWHERE)])
    assert NOWHERE not in routed.destinations, "the picker obeyed the header that the client sent"


async def _a_bad_request_is_400_in_json(target: PickerUnderTest) -> None:
    _not_asked("without a path the picker cannot know the API", where=target.mode.bare)
    for body in (b"hello", b"[]"):
        refused = (await target.route(body, path=_CHAT)).refused
        assert refused.status == 400, f"{body!r} to {_CHAT} was answered with {refused.status}"
        _is_openai_error(refused)


async def _what_is_not_understood_is_routed(target: PickerUnderTest) -> None:
    odd: tuple[tuple[str, str, bytes | None], ...] = (
        ("POST", "/v2/tomorrow", b'{"anything": [1, 2, 3]}'),
        ("POST", "/upload", b"\x00\xff\x00"),
        ("GET", "/v1/fine_tuning/jobs", None),
        ("POST", _CHAT, None),
        ("POST", _CHAT, json.dumps({"model": target.model}).encode()),
        ("POST", "/v1/completions", b'{"prompt": "hi"}'),
        ("DELETE", "/v1/responses/1", None),
    )
    for method, path, body in odd:
        routed = await target.route(body, method=method, path=path)
        assert routed.immediate is None, f"{method} {path} was refused with {routed.immediate}"
        assert routed.destinations


async def _odd_headers_do_no_harm(target: PickerUnderTest) -> None:
    if target.mode.bare:
        headers = [("x-request-id", "Mixed-Case"), ("x-long", "x" * 8000)]
    else:
        headers = [
            ("X-Request-ID", "Mixed-Case"),
            ("accept", "text/plain"),
            ("accept", "application/json"),
            ("x-bytes", "\xff\xfe"),
            ("x-long", "x" * 8000),
        ]
    routed = await target.route(_completion(target), headers=headers)
    assert routed.destinations
    assert routed.request.values("x-request-id") == ["Mixed-Case"], "x-request-id of the client was changed"


async def _a_request_id_is_made(target: PickerUnderTest) -> None:
    (made,) = (await target.route(_completion(target))).request.values("x-request-id") or [""]
    assert made, "no x-request-id was made"


async def _prompts_stay_with_their_prefix(target: PickerUnderTest) -> None:
    """Check that prompts go back to their server. Needs idle endpoints and a picker that routes by prefix."""
    bodies = _long_prompts(target)
    homes = [(await target.route(body)).destinations[0] for body in bodies]
    for body, home in zip(bodies, homes, strict=True):
        again = (await target.route(body)).destinations[0]
        assert again == home, f"a prompt that went to {home} went to {again} the second time"


async def _any_cut_gives_the_same_pick(target: PickerUnderTest) -> None:
    _needs_duplex(target)
    for body in _long_prompts(target):
        home = (await target.route(body)).destinations[0]
        for cuts in ((1,), (7, 4000), (len(body) - 1,), range(1000, len(body), 1000)):
            pieces = [body[start:end] for start, end in pairwise([0, *cuts, len(body)])]
            again = (await target.route(pieces)).destinations[0]
            assert again == home, f"cut at {list(cuts)[:3]}, a prompt of {home} went to {again}"


async def _the_answer_passes_unchanged(target: PickerUnderTest) -> None:
    _needs_duplex(target)
    pieces = [b'data: {"choices": [{"text": "%d"}]}\n\n' % n for n in range(1000)]
    async with dataplane.exchange(target.channel, mode=target.mode) as exchange:
        await exchange.send(_completion(target))
        assert exchange.immediate is None, f"refused with {exchange.immediate}"
        await exchange.respond(pieces, headers=[("content-type", "text/event-stream")])
        assert exchange.response.body == b"".join(pieces), (
            "the answer that came back differs from the server's answer"
        )
        await exchange.finish()


async def _an_open_stream_may_be_dropped(target: PickerUnderTest) -> None:
    async with dataplane.exchange(target.channel, mode=target.mode) as exchange:
        await exchange.begin()
    assert (await target.route(_completion(target))).destinations, (
        "after a client had left, the next request was not routed"
    )


async def _an_unknown_model_is_404(target: PickerUnderTest) -> None:
    _needs_models(target)
    refused = (await target.route(_completion(target, model=_NOBODYS))).refused
    assert refused.status == 404, f"a model that no server has was answered with {refused.status}"
    _is_openai_error(refused)


async def _all_models_are_listed(target: PickerUnderTest) -> None:
    _needs_models(target)
    routed = await target.route(None, method="GET", path="/v1/models")
    assert routed.refused.status == 200, f"GET /v1/models was answered with {routed.refused.status}"
    names = [card["id"] for card in json.loads(routed.refused.body)["data"]]
    assert target.model in names, f"{target.model} is not among {names[:20]}"
    assert len(set(names)) == len(names), f"a name is listed twice: {names[:20]}"


async def _an_alias_goes_on_as_its_target(target: PickerUnderTest) -> None:
    if target.alias is None:
        raise NotAskedError("no alias is named (--alias)")
    _not_asked("this gateway takes no body back", where=target.mode.bare)
    alias, model = target.alias
    routed = await target.route(_completion(target, model=alias))
    assert routed.immediate is None, f"refused with {routed.immediate}"
    assert routed.request.body == _completion(target, model=model), (
        f"the body that was sent on is {routed.request.body[:200]!r}"
    )


async def _a_client_names_no_server_to_call(target: PickerUnderTest) -> None:
    _not_asked("this gateway changes no header", where=target.mode.bare)
    for name in _OBEYED:
        routed = await target.route(_completion(target), headers=[(name, NOWHERE)])
        assert NOWHERE not in routed.request.values(name), f"the client's {name} was sent on"


async def _a_prefill_server_is_named(target: PickerUnderTest) -> None:
    """Check that a prefill server computes a long prompt for a busy decode server. Needs idle endpoints."""
    _not_asked("no prefill endpoint is named (--prefillers)", where=not target.prefillers)
    _not_asked("this gateway changes no header", where=target.mode.bare)
    async with AsyncExitStack() as stack:
        for n in range(4 * len(target.endpoints)):
            under_way = await stack.enter_async_context(dataplane.exchange(target.channel, mode=target.mode))
            await under_way.send(_completion(target, f"{n} is under way"))
        long = _completion(target, "".join(f"sentence {n} of a long prompt. " for n in range(3000)))
        routed = await target.route(long)
    (named,) = routed.request.values("x-prefiller-host-port") or [""]
    assert named in target.prefillers, f"the pick names {named!r}, which is none of {list(target.prefillers)}"


CHECKS: Final[Sequence[Check]] = (
    Check(17, "a prompt goes to the server that has its prefix", _prompts_stay_with_their_prefix),
    Check(1, "a request is routed to one of the endpoints, with a body and without", _a_request_is_routed),
    Check(2, "a long body comes back byte for byte, in small pieces, with one end", _the_body_comes_back),
    Check(2, "headers are answered first and trailers last", _trailers_are_answered_last),
    Check(2, "an answer of 1,000 pieces passes unchanged", _the_answer_passes_unchanged),
    Check(3, "only endpoints of the subset hint are named, for a list and for a text", _the_subset_binds),
    Check(3, "the port counts in the subset hint", _the_port_counts),
    Check(4, "header and metadata name the same endpoint", _header_and_metadata_are_equal),
    Check(5, "a pick names as many destinations as the gateway reads", _as_many_destinations_as_are_read),
    Check(6, "a request without an eligible endpoint gets 503", _nobody_eligible_is_503),
    Check(8, "gRPC health answers under each of its four names", _health_has_its_names),
    Check(11, "a client cannot choose its server", _a_client_does_not_name_its_server),
    Check(
        12, "a request that no server could read gets 400 in OpenAI's format", _a_bad_request_is_400_in_json
    ),
    Check(
        13,
        "a request that the picker does not understand is routed all the same",
        _what_is_not_understood_is_routed,
    ),
    Check(14, "a client that leaves midway does not affect the next request", _an_open_stream_may_be_dropped),
    Check(
        15,
        "headers may have names in any case, several values, and bytes that are not text",
        _odd_headers_do_no_harm,
    ),
    Check(16, "a request without x-request-id gets one", _a_request_id_is_made),
    Check(17, "any cut of the same bytes gives the same pick", _any_cut_gives_the_same_pick),
    Check(19, "a model that no server has gets 404 in OpenAI's format", _an_unknown_model_is_404),
    Check(19, "GET /v1/models lists every model once", _all_models_are_listed),
    Check(
        19, "a request for an alias is sent on as a request for its target", _an_alias_goes_on_as_its_target
    ),
    Check(
        20, "a client cannot name a server that its own server would call", _a_client_names_no_server_to_call
    ),
    Check(
        20, "a busy decode server has a long prompt computed by a prefill server", _a_prefill_server_is_named
    ),
)
"""In the order in which they run. The first needs idle endpoints. If a gateway shows no answers, the others
leave requests behind that the picker must believe to be in flight.
"""


def _completion(target: PickerUnderTest, prompt: str = "hello " * 100, *, model: str = "") -> bytes:
    document = {"model": model or target.model, "prompt": prompt}
    return json.dumps(document, ensure_ascii=False).encode()


def _long_prompts(target: PickerUnderTest) -> list[bytes]:
    return [_completion(target, f"Prompt {n} \N{SNOWMAN} of a conversation. " * 120) for n in range(3)]


def _is_openai_error(refused: Immediate) -> None:
    kind = refused.headers.get("content-type", "")
    assert kind.startswith("application/json"), f"content-type is {kind!r}"
    error = json.loads(refused.body)["error"]
    missing = {"message", "type", "param", "code"} - set(error)
    assert not missing, f"the error has no {sorted(missing)}"


def _not_asked(why: str, *, where: bool) -> None:
    if where:
        raise NotAskedError(why)


def _needs_duplex(target: PickerUnderTest) -> None:
    _not_asked("this gateway takes no body back", where=not target.mode.duplex or target.mode.bare)


def _needs_subsets(target: PickerUnderTest) -> None:
    _not_asked("this gateway sends no subset hint", where=target.dialect not in SENDS_SUBSETS)


def _needs_models(target: PickerUnderTest) -> None:
    why_not = "the command line does not say whether the picker knows its endpoints' models (--model)"
    _not_asked(why_not, where=not target.knows_models)
    _not_asked("this gateway shows no path and takes no answer", where=target.mode.bare)
