"""A line says what stands in it, and whatever is wrong with it is named with what is allowed."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.twin.serving.worlds import GOOD, line
from tests.worlds import LAWS
from twin.serving import entries
from twin.serving.entries import MAX_LINE_BYTES, Entry, Wrong
from twin.serving.lines import Lines


def read(*given: str | bytes) -> list[Entry]:
    checked = Lines()
    texts = [each if isinstance(each, bytes) else each.encode() for each in given]
    return [checked.entry(text + b"\n", number) for number, text in enumerate(texts, 1)]


def line_refusal(*given: str | bytes) -> str:
    with pytest.raises(Wrong) as caught:
        read(*given)
    assert "\n" not in str(caught.value)
    return str(caught.value)


TOKENS = "allowed are whole numbers from 1 to 2,147,483,647"
TIMES = "allowed are numbers from 0 to 1e+15"
ONE = "allowed is one of them"
NAMES = "allowed are text and whole numbers of 64 bits"
HALF_A_PREFIX = "has one of prefix_id and prefix_tokens, allowed are both or none"
WRONG_LINES = {
    "no arrival": (line(arrival_s=...), "has no arrival_s (or timestamp)"),
    "no prompt": (line(prompt_tokens=...), "has no prompt_tokens (or input_length or prompt)"),
    "no output": (line(output_tokens=...), "has no output_tokens (or output_length or output)"),
    "two arrivals": (line(timestamp=1), f"has both arrival_s and timestamp, {ONE}"),
    "negative time": (line(arrival_s=-0.5), f"arrival_s is -0.5, {TIMES}"),
    "late time": (line(arrival_s=1e16), f"arrival_s is 1e+16, {TIMES}"),
    "time as text": (line(arrival_s="1"), f'arrival_s is "1", {TIMES}'),
    "null": (line(arrival_s=None), f"arrival_s is null, {TIMES}"),
    "prompt of nothing": (line(prompt_tokens=0), f"prompt_tokens is 0, {TOKENS}"),
    "half a token": (line(prompt_tokens=1.5), f"prompt_tokens is 1.5, {TOKENS}"),
    "huge output": (line(output_tokens=2**31), f"output_tokens is 2147483648, {TOKENS}"),
    "endless number": (line(output_tokens=10**60), f"output_tokens is {'1' + '0' * 36}..., {TOKENS}"),
    "an inner key twice and an endless number": (
        f'{GOOD[:-1]}, "user": {{"a": 1, "a": {"9" * 5000}}}}}',
        'has "a" twice, allowed is once',
    ),
    "list of tokens": (line(output_tokens=[1]), f"output_tokens is [1], {TOKENS}"),
    "bool id": (line(id=True), f"id is true, {NAMES}"),
    "huge id": (line(id=2**63), f"id is 9223372036854775808, {NAMES}"),
    "long id": (line(id="x" * 201), "id has 201 characters, allowed are 200"),
    "prefix without tokens": (line(prefix_id=1), HALF_A_PREFIX),
    "tokens without prefix": (line(prefix_tokens=1), HALF_A_PREFIX),
    "prefix beyond prompt": (
        line(prefix_id=1, prefix_tokens=11),
        "prefix_tokens is 11, allowed are whole numbers from 1 to 10",
    ),
    "two prefixes": (line(prefix_id=1, prefix_tokens=1, hash_ids=[1]), f"has both prefix_id and hash_ids, {ONE}"),
    "hashes as text": (line(hash_ids="1,2"), 'hash_ids is "1,2", allowed is a list'),
    "a bool among the hashes": (line(hash_ids=[True]), f"hash_ids is true, {NAMES}"),
    "NaN": (line(arrival_s=float("nan")), "not a JSON object: JSON is malformed: invalid character (byte 14)"),
    "out of range": ('{"arrival_s": 1e999}', "not a JSON object: Number out of range - at `$.arrival_s`"),
    "list": ("[1, 2]", "not a JSON object: Expected `object`, got `array`"),
    "two objects": (GOOD + GOOD, "not a JSON object: JSON is malformed: trailing characters (byte 58)"),
    "deep": ('{"x": ' + "[" * 10**5, "not a request: nested too deeply"),
    "not UTF-8": (b'{"user": "\xe9"}', "not UTF-8 text (byte 10)"),
    "UTF-16": (GOOD.encode("utf-16"), "not UTF-8 text (byte 0)"),
    "too long": (line(user="x" * MAX_LINE_BYTES), "the line is longer than 1,048,576 bytes"),
    "a key twice": (f'{GOOD[:-1]}, "prompt\\u005ftokens": 11}}', 'has "prompt_tokens" twice, allowed is once'),
    "an inner key twice": (f'{GOOD[:-1]}, "user": {{"a": 1, "a" : 2}}}}', 'has "a" twice, allowed is once'),
    "out of order": (
        line(arrival_s=0.5),
        "arrival_s is 0.5, before 1 of the request before; sort the trace by arrival",
    ),
    "another key of time": (
        line(arrival_s=..., timestamp=2000),
        f"timestamp after arrival_s in the lines before, {ONE} in a file",
    ),
}


@pytest.mark.parametrize("name", WRONG_LINES)
def test_a_wrong_line_is_named_with_what_is_allowed(name: str) -> None:
    wrong, message = WRONG_LINES[name]
    read(GOOD, GOOD)
    assert line_refusal(GOOD, wrong, GOOD) == message


KEYS = st.sampled_from(["a", "b:", 'c"', "d\\", "é"])
VALUES = st.recursive(
    st.integers(0, 9) | st.sampled_from(["", "a", '"a":', '\\", "a": ', "b:"]),
    lambda inner: st.lists(inner, max_size=3) | st.lists(st.tuples(KEYS, inner), max_size=3).map(tuple),
    max_leaves=8,
)


def json_of(value: Any) -> str:
    """JSON of a value in which tuples of pairs are objects, whose keys may come twice."""
    if isinstance(value, tuple):
        return f"{{{', '.join(f'{json.dumps(key)}: {json_of(each)}' for key, each in value)}}}"
    return f"[{', '.join(map(json_of, value))}]" if isinstance(value, list) else json.dumps(value)


def repeats(value: Any) -> bool:
    if isinstance(value, tuple):
        return len({key for key, _ in value}) < len(value) or any(repeats(each) for _, each in value)
    return isinstance(value, list) and any(map(repeats, value))


@LAWS
@given(VALUES)
def test_a_line_is_refused_for_a_key_exactly_where_an_object_has_it_twice(value: Any) -> None:
    text = f'{GOOD[:-1]}, "user": {json_of(value)}}}'
    if repeats(value):
        assert line_refusal(text).endswith(" twice, allowed is once")
    else:
        assert read(text) == read(GOOD)


def test_a_number_of_thousands_of_digits_beside_keys_that_are_alike_is_none_of_our_business() -> None:
    assert read(f'{GOOD[:-1]}, "user": {{"id": {"9" * 5000}, "x": {{"id": 1}}}}}}')


def test_an_id_that_appears_twice_is_refused_as_long_as_it_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    assert line_refusal(line(id="a"), line(id="b"), line(id="a")) == 'id "a" appears twice, allowed is once'
    assert line_refusal(line(id=7), line(request_id=7)) == "request_id 7 appears twice, allowed is once"
    assert len(read(line(id=1), line(id="1"), line())) == 3
    monkeypatch.setattr(entries, "REMEMBERED_IDS", 2)
    assert len(read(*(line(id=name) for name in "abcc"))) == 4


def test_a_line_says_what_stands_in_it() -> None:
    hashed = {"timestamp": 61.5, "input_length": 48, "output_length": 2, "hash_ids": [1, "x"]}
    (entry,) = read(json.dumps(hashed | {"chat_id": 1, "parent_chat_id": -1, "turn": 1}))
    assert entry == Entry(
        line=1, id=0, arrival=61.5, in_seconds=False, prompt_tokens=48, output_tokens=2, prefix_ids=(1, "x"),
        prefix_tokens=0, in_chats=True,
    )  # fmt: skip
    assert entry.hashes == 2
    (entry,) = read(line(prefix_id="p", prefix_tokens=4))
    assert (entry.in_seconds, entry.prefix_ids, entry.prefix_tokens, entry.hashes) == (True, ("p",), 4, 0)
    assert not entry.in_chats
