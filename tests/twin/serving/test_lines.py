"""Every way in which a line of a trace can be wrong, by itself or after the ones before it."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.twin.serving.worlds import GOOD, line
from tests.worlds import LAWS
from twin.serving import traces as lines
from twin.serving.traces import MAX_LINE_BYTES, Entry, Lines, Wrong


def read(*given: str | bytes) -> list[Entry]:
    checked = Lines()
    texts = [each if isinstance(each, bytes) else each.encode() for each in given]
    return [checked.entry(text + b"\n", number) for number, text in enumerate(texts, 1)]


def refusal(*given: str | bytes) -> str:
    with pytest.raises(Wrong) as caught:
        read(*given)
    assert "\n" not in str(caught.value)
    return str(caught.value)


TOKENS = "allowed are whole numbers from 1 to 2,147,483,647"
TIMES = "allowed are numbers from 0 to 1e+15"
WRONG_LINES = {
    "no arrival": (line(arrival_s=...), "has no arrival_s (or timestamp)"),
    "no prompt": (line(prompt_tokens=...), "has no prompt_tokens (or input_length or prompt)"),
    "no output": (line(output_tokens=...), "has no output_tokens (or output_length or output)"),
    "two arrivals": (line(timestamp=1), "has both arrival_s and timestamp, allowed is one of them"),
    "two prompts": (line(input_length=1), "has both prompt_tokens and input_length, allowed is one of them"),
    "two ids": (line(id=1, request_id=1), "has both id and request_id, allowed is one of them"),
    "negative time": (line(arrival_s=-0.5), f"arrival_s is -0.5, {TIMES}"),
    "late time": (line(arrival_s=1e16), f"arrival_s is 1e+16, {TIMES}"),
    "time as text": (line(arrival_s="1"), f'arrival_s is "1", {TIMES}'),
    "time as bool": (line(arrival_s=True), f"arrival_s is true, {TIMES}"),
    "null": (line(arrival_s=None), f"arrival_s is null, {TIMES}"),
    "prompt of nothing": (line(prompt_tokens=0), f"prompt_tokens is 0, {TOKENS}"),
    "prompt as text": (line(prompt_tokens=..., prompt="Hello"), f'prompt is "Hello", {TOKENS}'),
    "prompt as bool": (line(prompt_tokens=False), f"prompt_tokens is false, {TOKENS}"),
    "half a token": (line(prompt_tokens=1.5), f"prompt_tokens is 1.5, {TOKENS}"),
    "output of nothing": (line(output_tokens=0), f"output_tokens is 0, {TOKENS}"),
    "negative output": (line(output_tokens=-3), f"output_tokens is -3, {TOKENS}"),
    "huge output": (line(output_tokens=2**31), f"output_tokens is 2147483648, {TOKENS}"),
    "endless number": (line(output_tokens=10**60), f"output_tokens is {'1' + '0' * 36}..., {TOKENS}"),
    "list of tokens": (line(output_tokens=[1]), f"output_tokens is [1], {TOKENS}"),
    "fractional id": (line(id=1.0), "id is 1.0, allowed are text and whole numbers of 64 bits"),
    "bool id": (line(id=True), "id is true, allowed are text and whole numbers of 64 bits"),
    "huge id": (line(id=2**63), "id is 9223372036854775808, allowed are text and whole numbers of 64 bits"),
    "long id": (line(id="x" * 201), "id has 201 characters, allowed are 200"),
    "prefix without tokens": (line(prefix_id=1), "has one of prefix_id and prefix_tokens, allowed are both or none"),
    "tokens without prefix": (
        line(prefix_tokens=1),
        "has one of prefix_id and prefix_tokens, allowed are both or none",
    ),
    "prefix beyond prompt": (
        line(prefix_id=1, prefix_tokens=11),
        "prefix_tokens is 11, allowed are whole numbers from 1 to 10",
    ),
    "two prefixes": (
        line(prefix_id=1, prefix_tokens=1, hash_ids=[1]),
        "has both prefix_id and hash_ids, allowed is one of them",
    ),
    "hashes as text": (line(hash_ids="1,2"), 'hash_ids is "1,2", allowed is a list'),
    "a bool among the hashes": (
        line(hash_ids=[True]),
        "hash_ids is true, allowed are text and whole numbers of 64 bits",
    ),
    "NaN": (line(arrival_s=float("nan")), "not a JSON object: JSON is malformed: invalid character (byte 14)"),
    "infinite": (line(arrival_s=float("inf")), "not a JSON object: JSON is malformed: invalid character (byte 14)"),
    "out of range": ('{"arrival_s": 1e999}', "not a JSON object: Number out of range - at `$.arrival_s`"),
    "list": ("[1, 2]", "not a JSON object: Expected `object`, got `array`"),
    "number": ("12", "not a JSON object: Expected `object`, got `int`"),
    "two objects": (GOOD + GOOD, "not a JSON object: JSON is malformed: trailing characters (byte 58)"),
    "csv": ("0.0,10,5", "not a JSON object: Expected `object`, got `float`"),
    "deep": ('{"x": ' + "[" * 10**5, "not a request: nested too deeply"),
    "not UTF-8": (b'{"user": "\xe9"}', "not UTF-8 text (byte 10)"),
    "UTF-16": (GOOD.encode("utf-16"), "not UTF-8 text (byte 0)"),
    "too long": (line(user="x" * MAX_LINE_BYTES), "the line is longer than 1,048,576 bytes"),
}


@pytest.mark.parametrize("name", WRONG_LINES)
def test_a_wrong_line_is_named_with_what_is_allowed(name: str) -> None:
    wrong, message = WRONG_LINES[name]
    read(GOOD, GOOD)
    assert refusal(GOOD, wrong, GOOD) == message


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ('{"arrival_s": 1, "prompt_tokens": 10, "output_tokens": 5, "arrival_s": 2}', "arrival_s"),
        ('{"arrival_s": 1, "prompt_tokens": 10, "prompt_tokens": 10, "output_tokens": 5}', "prompt_tokens"),
        ('{"arrival_s": 1, "prompt_tokens": 10, "output_tokens": 5, "prompt\\u005ftokens": 11}', "prompt_tokens"),
        ('{"user": 1, "user" : 2, "arrival_s": 1, "prompt_tokens": 10, "output_tokens": 5}', "user"),
        ('{"user": {"a": 1, "a": 2}, "arrival_s": 1, "prompt_tokens": 10, "output_tokens": 5}', "a"),
    ],
)
def test_a_key_that_stands_twice_is_refused(text: str, key: str) -> None:
    assert refusal(text) == f'has "{key}" twice, allowed is once'


KEYS = st.sampled_from(["a", "b:", 'c"', "d\\", "é"])
VALUES = st.recursive(
    st.integers(0, 9) | st.sampled_from(["", "a", '"a":', '\\", "a": ', "b:"]),
    lambda inner: st.lists(inner, max_size=3) | st.lists(st.tuples(KEYS, inner), max_size=3).map(tuple),
    max_leaves=8,
)


def written(value: Any) -> str:
    """JSON of a value in which tuples of pairs are objects, whose keys may come twice."""
    if isinstance(value, tuple):
        return f"{{{', '.join(f'{json.dumps(key)}: {written(each)}' for key, each in value)}}}"
    return f"[{', '.join(map(written, value))}]" if isinstance(value, list) else json.dumps(value)


def repeats(value: Any) -> bool:
    if isinstance(value, tuple):
        return len({key for key, _ in value}) < len(value) or any(repeats(each) for _, each in value)
    return isinstance(value, list) and any(map(repeats, value))


@LAWS
@given(VALUES)
def test_a_line_is_refused_for_a_key_exactly_where_an_object_has_it_twice(value: Any) -> None:
    text = f'{GOOD[:-1]}, "user": {written(value)}}}'
    if repeats(value):
        assert refusal(text).endswith(" twice, allowed is once")
    else:
        assert read(text) == read(GOOD)


def test_arrivals_out_of_order() -> None:
    said = "arrival_s is 2.5, before 3 of the request before; sort the trace by arrival"
    assert refusal(line(arrival_s=3), line(arrival_s=3), line(arrival_s=2.5)) == said


def test_two_clocks_in_one_file() -> None:
    said = "timestamp after arrival_s in the lines before, allowed is one of them in a file"
    assert refusal(line(), line(arrival_s=..., timestamp=2000)) == said


def test_an_id_that_appears_twice() -> None:
    assert refusal(line(id="a"), line(id="b"), line(id="a")) == 'id "a" appears twice, allowed is once'
    assert refusal(line(id=7), line(request_id=7)) == "request_id 7 appears twice, allowed is once"
    assert len(read(line(id=1), line(id="1"), line())) == 3


def test_no_more_ids_are_remembered_than_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "REMEMBERED_IDS", 2)
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
