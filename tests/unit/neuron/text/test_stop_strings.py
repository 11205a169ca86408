"""Stop strings in streamed text."""

import random

import pytest

from helexa.neuron.text.stop_strings import StopStrings


def stream(stops: list[str], pieces: list[str]) -> tuple[str, bool]:
    """Pass `pieces` through the filter. Return the resulting text, and whether a stop string was found."""
    filter = StopStrings(stops)
    passed = ""
    for piece in pieces:
        text, stopped = filter.push(piece)
        passed += text
        if stopped:
            assert filter.flush() == ""
            return passed, True
    return passed + filter.flush(), False


def expected(stops: list[str], text: str) -> tuple[str, bool]:
    """Return the text before the stop string that ends first, and whether there is one.

    If several stop strings end at the same position, the longest one counts.
    """
    for end in range(len(text) + 1):
        starts = [end - len(stop) for stop in stops if stop and text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)], True
    return text, False


@pytest.mark.parametrize("text", ["before STOP after", "STOP", "before STOSTOP", "before STO", "none at all", "S", ""])
def test_stop_string_split_over_several_chunks_is_found(text):
    for first in range(len(text) + 1):
        for second in range(first, len(text) + 1):
            assert stream(["STOP"], [text[:first], text[first:second], text[second:]]) == expected(["STOP"], text)


def test_match_of_a_stop_string_does_not_depend_on_chunk_boundaries():
    chance = random.Random(7)
    for _ in range(3000):
        stops = ["".join(chance.choices("abc", k=chance.randint(0, 5))) for _ in range(chance.randint(0, 4))]
        text = "".join(chance.choices("abc", k=chance.randint(0, 30)))
        cuts = sorted(chance.choices(range(len(text) + 1), k=chance.randint(0, 10)))
        pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert stream(stops, pieces) == expected(stops, text), (stops, pieces)


def test_only_text_that_may_begin_a_stop_string_is_held_back():
    filter = StopStrings(["\n\nUser:", "###"])
    assert filter.push("line\n") == ("line", False)
    assert filter.push("next") == ("\nnext", False)
    assert filter.push(" ##") == (" ", False)
    assert filter.push("x") == ("##x", False)
    assert filter.matched is None
    assert filter.push("\n\nUse") == ("", False)
    assert filter.push("r: hi") == ("", True)
    assert filter.matched == "\n\nUser:"


def test_text_is_returned_unchanged_if_there_are_no_stop_strings():
    assert StopStrings([]).push("text") == ("text", False)
    assert StopStrings([""]).push("text") == ("text", False)
