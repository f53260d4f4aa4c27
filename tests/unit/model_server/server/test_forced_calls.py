"""Arguments of a forced call that cannot be decoded stay a text."""

from __future__ import annotations

import pytest

from model_server.server.structured import call_in


@pytest.mark.parametrize("depth", [3000, 100_000])
def test_a_call_whose_arguments_nobody_can_decode_is_a_text(depth: int) -> None:
    assert call_in(f'{{"name": "a", "parameters": {"[" * depth}{"]" * depth}}}') is None


def test_a_call_has_its_name_and_its_arguments() -> None:
    assert call_in('{"name": "a", "parameters": {"b": [1]}}') == ("a", '{"b": [1]}')
