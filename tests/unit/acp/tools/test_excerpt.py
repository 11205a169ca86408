"""Shortened and escaped text stays valid text."""

from hypothesis import given
from hypothesis import strategies as st

from helexa.acp.tools.excerpt import clipped, ends, fenced, printable, shown_whole, title

_FAMILY = "\U0001f468\u200d\U0001f469\u200d\U0001f467"


def test_title_of_a_tool_call_is_one_line_cut_between_complete_characters() -> None:
    assert title("a\n\tb") == "a b"
    assert title("x" * 60) == "x" * 60
    assert title("x" * 61) == "x" * 59 + "…"
    assert title("x" * 58 + "e\u0301" + "yyy") == "x" * 58 + "…"
    assert title("x" * 57 + _FAMILY + "yyy") == "x" * 57 + "…"
    assert title("x" * 58 + "\U0001f44d\U0001f3fd" + "yyy") == "x" * 58 + "…"
    assert title("evil\u202etxt\x1b[0m") == "evil\\u202etxt\\x1b[0m"
    assert title("e" + "\u0301" * 100) == "e" + "\u0301" * 58 + "…"


@given(st.text(st.characters(), max_size=200))
def test_title_of_any_text_has_at_most_60_encodable_characters(text: str) -> None:
    shown = title(text)
    assert len(shown) <= 60
    assert "\n" not in shown
    shown.encode()


def test_function_clipped_returns_the_beginning_of_a_text_and_the_number_of_omitted_bytes() -> None:
    assert clipped("äöü", 6) == "äöü"
    assert clipped("äöü", 5) == "äö\n[1 more bytes are left out]"


def test_function_ends_returns_the_beginning_and_the_end_of_a_long_text() -> None:
    text = "begin" + "é" * 1000 + "end"
    cut = ends(text, 100)
    assert cut.startswith("begin") and cut.endswith("end") and "\ufffd" not in cut
    assert "[1908 bytes are left out here]" in cut
    assert ends("short", 100) == "short"


def test_fence_of_a_code_block_is_longer_than_backticks_in_the_text() -> None:
    assert fenced("a ``` b") == "````\na ``` b\n````"


def test_function_printable_escapes_line_separators_and_surrogates() -> None:
    assert printable("a\u2028b\ud83dc\u00a0") == "a\\u2028b\\ud83dc\u00a0"


def test_function_shown_whole_escapes_all_invisible_characters() -> None:
    invisible = "\u200d\u200c\u00a0\u3000\ufe0f\U000e0100\u3164\u115f\u1160\uffa0\u034f\u2800\u202e\x1b\r"
    for character in invisible:
        assert shown_whole(f"a{character}b") == f"a{character.encode('unicode_escape').decode()}b"
    assert shown_whole("a b\n\tc é 漢字 👍") == "a b\n\tc é 漢字 👍"
