"""What moved is found, named and told apart from rounding; what is written can be read again and is stable."""

import copy
import functools
import json
import math
import operator
from typing import Any

import pytest

from tests.golden.answers import digest, folded, kept, read
from tests.golden.moves import ABSENT, Compared, Move, compared, moves, report, same, settled

Path = tuple[str | int, ...]


@pytest.fixture(scope="module")
def answers() -> dict[str, Any]:
    """Ten of the kept ones, that with the most fields first."""
    every = read("predict")
    return {question: every[question] for question in sorted(every, key=lambda each: -len(leaves(every[each])))[:10]}


def leaves(node: Any, path: Path = ()) -> list[tuple[Path, Any]]:
    """Every leaf of an answer with its path."""
    if not isinstance(node, dict | list):
        return [(path, node)]
    inner = node.items() if isinstance(node, dict) else enumerate(node)
    return [leaf for key, child in inner for leaf in leaves(child, (*path, key))]


def with_leaf(node: Any, path: Path, value: Any) -> Any:
    changed = copy.deepcopy(node)
    functools.reduce(operator.getitem, path[:-1], changed)[path[-1]] = value
    return changed


def other(value: Any) -> Any:
    """Nearly the same, but not the same."""
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, float):
        return value * (1 + 1e-8) if abs(value) > 1e-6 else value + 1e-9
    return value + 1 if isinstance(value, int) else f"{value}!"


def test_any_field_of_a_kept_answer_that_moves_is_found_and_named(answers: dict[str, Any]) -> None:
    question = next(iter(answers))
    for path, value in leaves(answers[question]):
        moved = answers | {question: with_leaf(answers[question], path, other(value))}
        [move] = compared(answers, moved).moves
        assert (move.question, move.old, move.new) == (question, value, other(value))
        assert str(path[-1]).strip("[]") in move.field


def test_the_last_digits_of_a_processor_are_no_move_and_leave_the_file_as_it_is(answers: dict[str, Any]) -> None:
    question, shaken = next(iter(answers.items()))
    for path, value in leaves(shaken):
        if isinstance(value, float):
            shaken = with_leaf(shaken, path, math.nextafter(value, math.inf))
    assert shaken != answers[question]
    assert not compared(answers, answers | {question: shaken})
    assert settled(answers[question], shaken) == answers[question]


def test_numbers_are_compared_by_ratio_and_all_else_exactly() -> None:
    equal = [(1.0, 1.0 + 1e-10), (0.0, 3e-16), (3, 3.0), ("a", "a")]
    other = [
        (1.0, 1.0 + 2e-9), (1e-6, 1.000001e-6), (0.0, 1e-12), (10**12, 10**12 + 1), (True, 1), (None, 0), ("a", "b"),
        ([1], {"a": 1}),
    ]  # fmt: skip
    assert all(same(old, new) for old, new in equal)
    assert not any(same(old, new) for old, new in other)


def test_a_field_or_a_question_that_comes_or_goes_is_told() -> None:
    assert list(moves({"a": 1}, {"b": 1}, question="q")) == [Move("q", "a", 1, ABSENT), Move("q", "b", ABSENT, 1)]
    assert [move.field for move in moves({"a": [1]}, {"a": [1, 2]}, question="q")] == ["a"]
    found = compared({"gone": {}, "both": {"x": 1}}, {"both": {"x": 1}, "new": {}})
    assert found == Compared(asked=2, moves=[], new=["new"], gone=["gone"])
    assert found
    assert report(found, most=1).splitlines()[-2:] == ["new: twin new", "gone: twin gone"]


def test_the_table_has_a_row_for_like_fields_with_the_largest_move_first() -> None:
    old = {"one": {"d": {"[a]": {"s": 1.0}, "[b]": {"s": 4.0}}, "t": 2.0}, "two": {"d": {}, "t": 2.0}}
    new = {"one": {"d": {"[a]": {"s": 1.1}, "[b]": {"s": 3.0}}, "t": 2.2}, "two": {"d": {}, "t": 2.02}}
    text = report(compared(old, new), most=20)
    assert text.splitlines()[0] == "2 of 2 answers moved; 0 are new, 0 are gone"
    assert text.splitlines()[4:] == [
        "| d[*].s | 2 | 4 | 3 | -25 % | one (d[b].s) |",
        "| t | 2 | 2 | 2.2 | +10 % | one |",
    ]
    assert report(compared(old, new), most=1).splitlines()[-1] == "... and 1 more fields"


def test_any_number_in_a_long_list_moves_its_digest() -> None:
    entries = [{"id": f"r{at}", "a_s": 0.1 * at, "b": at, "c": None} for at in range(300)]
    before = digest(entries)
    for at, field in ((0, "b"), (7, "a_s"), (299, "b")):
        changed = copy.deepcopy(entries)
        changed[at][field] += 1e-3
        found = {move.field for move in moves(before, digest(changed), question="q")}
        assert f"{field}.sum" in found
        assert found <= {f"{field}.sum", f"{field}.by_place"}
    swapped = [entries[1], entries[0], *entries[2:]]
    assert {move.field for move in moves(before, digest(swapped), question="q")} == {"a_s.by_place", "b.by_place"}


def test_named_entries_become_a_table_that_tells_equal_ones_once_and_what_is_written_is_read_as_it_was(
    answers: dict[str, Any],
) -> None:
    pools = [{"name": "gpu0", "bytes": 1}, {"name": "gpu1", "bytes": 1}, {"name": "host", "bytes": 2}]
    table = {"[gpu0]": {"bytes": 1}, "[gpu1]": "as [gpu0]", "[host]": {"bytes": 2}}
    assert kept({"devices": pools, "empty": []}) == {"devices": table, "empty": []}
    text = folded(answers)
    assert json.loads(text) == answers
    assert folded(json.loads(text)) == folded(dict(reversed(answers.items()))) == text
