"""Checks that all layouts share."""

import pytest

from twin.serving.entries import MAX_LINE_BYTES, Entry, Wrong, shown, text_of, tokens_of, unique


def test_an_entry_counts_hashes_but_not_a_named_prefix() -> None:
    usual = {"line": 1, "id": 0, "arrival": 0.0, "in_seconds": True, "prompt_tokens": 48, "output_tokens": 1}
    assert Entry(**usual, prefix_ids=(1, 2, 3)).hashes == 3  # type: ignore[arg-type]
    assert Entry(**usual, prefix_ids=("p",), prefix_tokens=4).hashes == 0  # type: ignore[arg-type]


def test_whole_floats_are_counts_and_nothing_else_is() -> None:
    assert tokens_of("n", 8.0) == 8
    for value in (0, -1, 1.5, True, "8", None, float("inf")):
        with pytest.raises(Wrong, match=r"n is .*, allowed are whole numbers from 1 to 9"):
            tokens_of("n", value, 9)


def test_a_line_is_text_of_bounded_length() -> None:
    assert text_of("é".encode()) == "é"
    for line, says in ((b"\xff", "not UTF-8 text"), (b"x" * (MAX_LINE_BYTES + 1), "longer than 1,048,576 bytes")):
        with pytest.raises(Wrong, match=says):
            text_of(line)


def test_a_key_that_stands_twice_is_refused() -> None:
    assert unique([("a", 1), ("b", 2)]) == {"a": 1, "b": 2}
    with pytest.raises(Wrong, match='has "a" twice'):
        unique([("a", 1), ("b", 2), ("a", 3)])


def test_what_is_shown_is_short() -> None:
    assert shown("x" * 100) == '"' + "x" * 36 + "..."
    assert shown(10**5000) == "a number of thousands of digits"
