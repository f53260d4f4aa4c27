"""The 400 for a body with broken framing reaches the client, and no other 400 is touched."""

from __future__ import annotations

from typing import Any

from epp.serve.envoy import error_replies, framing


def predicates() -> dict[str, str]:
    """Return what an answer must have for its replacement, by the kind of input."""
    filter_config = framing.replies()["typed_config"]
    (rule,) = filter_config["custom_response_matcher"]["matcher_list"]["matchers"]
    parts: list[dict[str, Any]] = rule["predicate"]["and_matcher"]["predicate"]
    singles = [part["single_predicate"] for part in parts]
    return {
        each["input"]["typed_config"]["@type"].rpartition(".")[2]: each["value_match"]["exact"]
        for each in singles
    }


def test_only_an_answer_of_envoy_itself_that_has_the_mark_is_replaced() -> None:
    assert predicates() == {
        "HttpResponseLocalReplyMatchInput": "true",
        "HttpResponseHeaderMatchInput": framing.MARK["header"]["value"],
    }


def test_envoy_marks_its_own_400_and_no_other_answer() -> None:
    marked = [mapper for mapper in error_replies.as_json()["mappers"] if "headers_to_add" in mapper]
    (mapper,) = marked
    assert mapper["headers_to_add"] == [framing.MARK]
    assert mapper["filter"]["status_code_filter"]["comparison"]["value"]["default_value"] == 400


def test_the_replacement_keeps_the_status() -> None:
    filter_config = framing.replies()["typed_config"]
    (rule,) = filter_config["custom_response_matcher"]["matcher_list"]["matchers"]
    assert rule["on_match"]["action"]["typed_config"]["status_code"] == 400
