"""Tokens become text: the same as all of them at once, and nothing of a stop string comes out."""

from collections.abc import Sequence

from hypothesis import given, strategies as st

from averaging.engine.messages import TokenText


def decode(tokens: Sequence[int]) -> str:
    return bytes(tokens).decode(errors="replace")


def pieces_of(text: str, stop: Sequence[str] = ()) -> tuple[list[str], str | None]:
    """The pieces of a text of which every byte is a token, until a stop string ends it."""
    writer = TokenText(decode, stop)
    pieces = []
    for token in text.encode():
        pieces.append(writer.add(token))
        if writer.stopped_by is not None:
            break
    pieces.append(writer.finish())
    return pieces, writer.stopped_by


@given(st.text(max_size=40), st.lists(st.text(min_size=1, max_size=3), max_size=3))
def test_the_pieces_are_the_text_until_the_first_stop_string(text: str, stop: list[str]) -> None:
    pieces, stopped_by = pieces_of(text, stop)
    places = [place for each in stop if (place := text.find(each)) >= 0]
    if stopped_by is None:
        assert not places
        assert "".join(pieces) == text
    else:
        whole = "".join(pieces)
        assert text.startswith(whole + stopped_by)
        assert not any(each in whole for each in stop)


def test_what_may_begin_a_stop_string_waits() -> None:
    pieces, stopped_by = pieces_of("x</b></a>y", ["</a>"])
    assert pieces[:6] == ["", "", "", "x", "<", "/"]
    assert "".join(pieces) == "x</b>"
    assert stopped_by == "</a>"
