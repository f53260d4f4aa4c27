"""Sends the 400 for a body with broken framing to the client without asking the picker.

Envoy makes a 400, passes it to its filters, and closes the connection at once. The filter of the external
processor would hold the 400 until the picker has seen it, so the client would get nothing. If a filter
replaces a response that has begun with an answer of its own, Envoy sends this answer directly, without the
other filters. The custom response filter does this here, before the filter of the external processor sees the
400. Pure; called by `listener`.
"""

from __future__ import annotations

from typing import Final

from envoy_data_plane.envoy.config.core.v3 import HeaderValue, HeaderValueOption
from envoy_data_plane.envoy.extensions.filters.http.custom_response.v3 import CustomResponse
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import HttpFilter
from envoy_data_plane.envoy.extensions.http.custom_response.local_response_policy.v3 import (
    LocalResponsePolicy,
)
from envoy_data_plane.envoy.type.matcher.v3 import (
    HttpResponseHeaderMatchInput,
    HttpResponseLocalReplyMatchInput,
)
from envoy_data_plane.google.protobuf import Any as AnyMessage
from envoy_data_plane.xds.core.v3 import TypedExtensionConfig as MatcherInput
from envoy_data_plane.xds.type.matcher.v3 import (
    Matcher,
    MatcherMatcherList,
    MatcherMatcherListFieldMatcher,
    MatcherMatcherListPredicate,
    MatcherMatcherListPredicatePredicateList,
    MatcherMatcherListPredicateSinglePredicate,
    MatcherOnMatch,
    StringMatcher,
)

_HEADER: Final = "connection"
_VALUE: Final = "close"

MARK: Final = HeaderValueOption(header=HeaderValue(key=_HEADER, value=_VALUE))
"""A header of the 400 that Envoy makes, which distinguishes it from the picker's own 400. Envoy replaces this
header when it writes the answer."""


def replies() -> HttpFilter:
    """The filter stands after the external processor in the list, because filters see answers from last to
    first.
    """
    envoys_own = _is(HttpResponseLocalReplyMatchInput(), "true")
    marked = _is(HttpResponseHeaderMatchInput(header_name=_HEADER), _VALUE)
    both = MatcherMatcherListPredicate(
        and_matcher=MatcherMatcherListPredicatePredicateList(predicate=[envoys_own, marked])
    )
    again = MatcherInput(name="again", typed_config=AnyMessage.pack(LocalResponsePolicy(status_code=400)))
    rule = MatcherMatcherListFieldMatcher(predicate=both, on_match=MatcherOnMatch(action=again))
    matcher = Matcher(matcher_list=MatcherMatcherList(matchers=[rule]))
    return HttpFilter(
        name="envoy.filters.http.custom_response",
        typed_config=AnyMessage.pack(CustomResponse(custom_response_matcher=matcher)),
    )


def _is(
    what: HttpResponseLocalReplyMatchInput | HttpResponseHeaderMatchInput, value: str
) -> MatcherMatcherListPredicate:
    return MatcherMatcherListPredicate(
        single_predicate=MatcherMatcherListPredicateSinglePredicate(
            input=MatcherInput(name="answer", typed_config=AnyMessage.pack(what)),
            value_match=StringMatcher(exact=value),
        )
    )
