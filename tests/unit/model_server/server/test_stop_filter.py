"""Stop strings, in answers that come in pieces cut anywhere."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model_server.server.stops import StopFilter, StopRule


def shown(pieces: list[str], rule: StopRule) -> tuple[list[str], bool]:
    """Return the text that comes out after each piece and at the end, and whether a stop string ended it."""
    answer, out = StopFilter(rule), []
    for piece in pieces:
        out.append(answer.feed(piece))
        if answer.stopped:
            return out, True
    return [*out, answer.flush()], False


def test_a_stop_string_across_pieces_is_never_shown() -> None:
    rule = StopRule(("\n\nUser:",))
    assert shown(["Hi", ".\n", "\nUse", "r: x"], rule) == (["Hi", ".", "", ""], True)


def test_text_that_only_began_like_a_stop_string_comes_later_or_at_the_end() -> None:
    rule = StopRule(("abcd",))
    assert shown(["xab", "ce", "ab"], rule) == (["x", "abce", "", "ab"], False)


def test_the_stop_string_is_shown_on_request() -> None:
    assert shown(["one. two"], StopRule((". ",), include=True)) == (["one. "], True)


def test_the_stop_string_that_starts_first_decides() -> None:
    assert shown(["a b c"], StopRule(("c", " b"))) == (["a"], True)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one character"):
        StopRule(("a", ""))


texts = st.text("ab", max_size=12)


@given(st.lists(texts, max_size=8), st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3))
def test_in_any_pieces_only_the_stop_string_is_hidden(pieces: list[str], stops: list[str]) -> None:
    whole = "".join(pieces)
    out, stopped = shown(pieces, StopRule(tuple(stops)))
    text = "".join(out)
    assert stopped == any(stop in whole for stop in stops)
    assert whole.startswith(text)
    if not stopped:
        assert text == whole
    else:
        assert not any(stop in text for stop in stops)
        assert any(whole[len(text) :].startswith(stop) for stop in stops)
    running = ""
    for piece in out:
        running += piece
        assert not any(stop in running for stop in stops)
