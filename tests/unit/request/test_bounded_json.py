"""JSON that would take long to decode is refused first. The test counts costs and measures no time."""

import pytest

from epp.request.jsontext import CostlyJsonError, check_cost, decode


@pytest.mark.parametrize(
    ("unit", "few", "many"),
    [
        *((unit, 5, 1_000) for unit in (b"1e-310", b"1E+5", b"1.7976931348623157e308")),
        *((unit, 5, 1_000) for unit in (b"0." + b"0" * 320 + b"1", b"9" * 300 + b".5")),
        *((unit, 5_000, 110_000) for unit in (b"[]", b"{}", b'""', b"0", b"0.5")),
    ],
)
def test_few_odd_numbers_and_many_values_are_read_and_more_are_not(unit: bytes, few: int, many: int) -> None:
    assert len(decode(b"[" + b",".join([unit] * few) + b"]")) == few
    with pytest.raises(CostlyJsonError):
        decode(b"[" + b",".join([unit] * many) + b"]")


def test_typical_json_of_clients_is_read() -> None:
    tool = b'{"type":"function","function":{"name":"f","parameters":{"type":"object","minimum":0.5,"tolerance":1e-6}}}'
    assert len(decode(b"[" + b",".join([tool] * 15) + b"]")) == 15
    check_cost(b'"' + b"a long text, " * 50_000 + b'"')


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (b"", "truncated"),
        (b"[", "truncated"),
        (b"nan", "invalid|malformed|truncated"),
        (b'"\xff"', "utf-8|UTF-8"),
        (b"[" * 90_000, "nested too deeply"),
        (b'"' + b"x" * 2**20 + b'"', "too large"),
    ],
)
def test_unreadable_json_is_a_value_error(wrong: bytes, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        decode(wrong)
