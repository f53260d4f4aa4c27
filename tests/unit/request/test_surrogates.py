"""Escapes of lone surrogates in JSON are replaced, and all other bytes stay."""

from __future__ import annotations

import pytest

from epp.request.surrogates import replace_lone

LONE = rb"\ufffd"


@pytest.mark.parametrize(
    ("escaped", "replaced"),
    [
        (rb"\ud800", LONE),
        (rb"\uDFFF", LONE),
        (rb"\ud800\ud83d\ude00", LONE + rb"\ud83d\ude00"),
        (rb"\ud83d\ude00\ude00", rb"\ud83d\ude00" + LONE),
        (rb"\ude00\ud83d", LONE + LONE),
        (rb"\ud83d \ude00", LONE + b" " + LONE),
        (rb"\ud83d\u0041", LONE + rb"\u0041"),
        (rb"\\\ud800", rb"\\" + LONE),
    ],
)
def test_only_a_surrogate_without_its_other_half_is_replaced(escaped: bytes, replaced: bytes) -> None:
    assert replace_lone(b'{"a":"x' + escaped + b'y"}') == b'{"a":"x' + replaced + b'y"}'


def test_json_with_more_than_1000_surrogates_is_not_changed() -> None:
    few, many = b'"' + rb"\ud800" * 1000 + b'"', b'"' + rb"\ud800" * 1001 + b'"'
    assert replace_lone(few) == b'"' + LONE * 1000 + b'"'
    assert replace_lone(many) is many
