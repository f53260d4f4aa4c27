"""Arguments of a forced call that cannot be decoded stay a text."""

from model_server.server.structured import call_in


def test_a_call_whose_arguments_nobody_can_decode_is_a_text() -> None:
    depth = 100_000
    assert call_in(f'{{"name": "a", "parameters": {"[" * depth}{"]" * depth}}}') is None


def test_a_call_has_its_name_and_its_arguments() -> None:
    assert call_in('{"name": "a", "parameters": {"b": [1]}}') == ("a", '{"b": [1]}')
