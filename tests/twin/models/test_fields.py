"""Keys of somebody else's table: taken in range, refused in one line by name, and remembered as used or ignored."""

from typing import Any

import pytest

from twin.errors import BadFile
from twin.models.fields import Fields


def fields(**raw: Any) -> Fields:
    return Fields(raw, "a file", "inner.")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (fields().missing("width", "size"), "a file: inner.width or size is missing"),
        (fields().unknown("kind", "odd"), "a file: inner.kind: is 'odd', which is not known"),
        (fields().unknown("kinds", "odd", verb="has"), "a file: inner.kinds: has 'odd', which is not known"),
        (
            fields().unknown("kind", "odd", ("even", "prime")),
            "a file: inner.kind: is 'odd', which is not known; known are even, prime",
        ),
        (
            fields(a=1, b="x" * 99).contradiction("a is less", "a", "b"),
            f"a file: inner.a 1 and inner.b '{'x' * 56}... contradict each other: a is less",
        ),
    ],
)
def test_a_refusal_is_one_line_that_names_file_and_key(error: BadFile, message: str) -> None:
    assert error.message == message


def test_the_first_key_that_is_there_is_taken_and_checked() -> None:
    table = fields(size=8, name=None, wide=2**40)
    assert table.integer("width", "size") == 8
    assert table.text("name", default="none") == "none"
    with pytest.raises(BadFile, match=r"inner\.wide: is 1099511627776, outside the range of 1 to 2,147,483,648"):
        table.integer("wide")
    with pytest.raises(BadFile, match=r"inner\.width is missing"):
        table.integer("width")


def test_a_flag_of_which_one_value_alone_is_known() -> None:
    fields().only("biased", expected=False)
    fields(biased=False).only("biased", expected=False)
    with pytest.raises(BadFile, match=r"inner\.biased: is true, which is not known of this architecture"):
        fields(biased=True).only("biased", expected=False)
    with pytest.raises(BadFile, match=r"inner\.biased: is false, which"):
        fields(biased=False).only("biased", expected=True)
    with pytest.raises(BadFile, match=r"inner\.biased: is 1, neither true nor false"):
        fields(biased=1).only("biased", expected=True)


def test_what_was_asked_for_stays_an_origin_whatever_is_said_of_it_later() -> None:
    table = fields(width=8, name="x", seed=1, strange=2, more={"kind": "y", "rest": 3})
    assert (table.integer("width"), table.text("name")) == (8, "x")
    table.without_effect("width", "seed", "absent")
    table.checked("name")
    inner = table.table("more")
    assert inner is not None
    assert inner.text("kind") == "y"
    assert table.origins() == {"inner.width": "8", "inner.more.kind": "'y'"}
    assert table.ignored() == ("inner.more.rest", "inner.strange")
    table.rest_without_effect()
    assert table.origins() == {"inner.width": "8", "inner.more.kind": "'y'"}
    assert table.ignored() == ()
