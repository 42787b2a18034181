"""Traces: both spellings, plain or gzipped, of any size; and every way in which a line can be wrong."""

import gzip
import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.twin.serving.worlds import PLAIN, PLENTY
from tests.worlds import LAWS
from twin.errors import BadFile
from twin.serving import traces
from twin.serving.limits import Limits
from twin.serving.requests import Request
from twin.serving.run import simulate_serving
from twin.serving.traces import MAX_LINE_BYTES, read_trace

Write = Callable[..., Path]
GOOD = '{"arrival_s": 1, "prompt_tokens": 10, "output_tokens": 5}'


@pytest.fixture
def written(tmp_path: Path) -> Write:
    def write(*lines: str | bytes, end: bytes = b"\n", name: str = "trace.jsonl") -> Path:
        parts = [line if isinstance(line, bytes) else line.encode() for line in lines]
        path = tmp_path / name
        path.write_bytes(b"\n".join(parts) + end)
        return path

    return write


def refusal(path: Path) -> str:
    with pytest.raises(BadFile) as caught:
        list(read_trace(path))
    assert "\n" not in str(caught.value)
    return str(caught.value).removeprefix(str(path))


def test_the_house_spelling_in_seconds(written: Write) -> None:
    first = {
        "id": "a",
        "arrival_s": 100.5,
        "prompt_tokens": 7,
        "output_tokens": 3,
        "prefix_id": "p",
        "prefix_tokens": 4,
    }
    second = {"arrival_s": 102, "prompt_tokens": 8.0, "output_tokens": 1, "user": {"any": "thing"}}
    assert list(read_trace(written(json.dumps(first), "", "  ", json.dumps(second)))) == [
        Request(id="a", arrival_s=0.0, prompt_tokens=7, output_tokens=3, prefix_ids=("p",), prefix_tokens=4, line=1),
        Request(id=1, arrival_s=1.5, prompt_tokens=8, output_tokens=1, line=4),
    ]


def test_mooncakes_spelling_in_milliseconds(written: Write) -> None:
    lines = (
        '{"timestamp": 27482, "input_length": 1030, "output_length": 52, "hash_ids": [46, 47, 48]}',
        '{"timestamp": 30535, "input_length": 100, "output_length": 26, "hash_ids": [0, 1, 2]}',
        '{"timestamp": 30535, "input_length": 100, "output_length": 26, "hash_ids": []}',
    )
    first, second, third = read_trace(written(*lines))
    assert (first.prefix_ids, first.prefix_tokens, first.prefix_span) == ((46, 47, 48), 1030, 512)
    assert (second.arrival_s, third.arrival_s) == (pytest.approx(3.053), pytest.approx(3.053))
    assert (second.prefix_ids, second.prefix_tokens) == ((0,), 100)  # hashes beyond the prompt are no part of it
    assert (third.prefix_ids, third.prefix_tokens) == ((), 0)


def test_epoch_milliseconds_keep_their_precision(written: Write) -> None:
    at = 1_764_435_600_000
    lines = [f'{{"timestamp": {at + offset}, "input_length": 1, "output_length": 1}}' for offset in (0, 1, 1001)]
    assert [each.arrival_s for each in read_trace(written(*lines))] == [0.0, 0.001, pytest.approx(1.001, rel=1e-12)]


@pytest.mark.parametrize("end", [b"\n", b"", b"\r\n", b"\n\n\n"])
def test_the_last_line_may_end_anyhow(written: Write, end: bytes) -> None:
    assert len(list(read_trace(written(GOOD, GOOD, end=end)))) == 2


def test_gzip_is_known_by_its_first_bytes(written: Write, tmp_path: Path) -> None:
    plain = written(GOOD, GOOD)
    zipped = tmp_path / "trace"
    zipped.write_bytes(gzip.compress(plain.read_bytes()))
    assert list(read_trace(zipped)) == list(read_trace(plain))


def test_a_byte_order_mark_is_no_content(written: Write) -> None:
    assert len(list(read_trace(written(b"\xef\xbb\xbf" + GOOD.encode())))) == 1


def line(**changed: Any) -> str:
    fields = {"arrival_s": 1, "prompt_tokens": 10, "output_tokens": 5, **changed}
    return json.dumps({name: value for name, value in fields.items() if value is not ...})


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
def test_a_wrong_line_is_named_with_what_is_allowed(written: Write, name: str) -> None:
    wrong, message = WRONG_LINES[name]
    assert refusal(written(GOOD, "", wrong, GOOD)) == f":3: {message}"


def test_a_last_line_that_is_cut_off(written: Write) -> None:
    path = written(GOOD, GOOD[:30], end=b"")
    assert refusal(path) == ":2: not a JSON object: Input data was truncated; the file ends here"


def test_arrivals_out_of_order(written: Write) -> None:
    path = written(line(arrival_s=3), line(arrival_s=3), line(arrival_s=2.5))
    assert refusal(path) == ":3: arrival_s is 2.5, before 3 of the request before; sort the trace by arrival"


def test_two_clocks_in_one_file(written: Write) -> None:
    path = written(line(), line(arrival_s=..., timestamp=2000))
    assert refusal(path) == ":2: timestamp after arrival_s in the lines before, allowed is one of them in a file"


def test_an_id_that_appears_twice(written: Write) -> None:
    assert refusal(written(line(id="a"), line(id="b"), line(id="a"))) == ':3: id "a" appears twice, allowed is once'
    assert refusal(written(line(id=7), line(request_id=7))) == ":2: request_id 7 appears twice, allowed is once"
    assert len(list(read_trace(written(line(id=1), line(id="1"), line())))) == 3


def test_no_more_ids_are_remembered_than_promised(written: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "REMEMBERED_IDS", 2)
    lines = [line(id=name) for name in "abcc"]
    assert len(list(read_trace(written(*lines)))) == 4


@pytest.mark.parametrize("lines", [(), ("",), ("", "  ", "\t")])
def test_a_file_without_requests(written: Write, lines: tuple[str, ...]) -> None:
    assert refusal(written(*lines)) == ": holds no requests"


def test_an_empty_file(tmp_path: Path) -> None:
    path = tmp_path / "empty.jsonl"
    path.touch()
    assert refusal(path) == ": holds no requests"


def test_what_is_no_file(tmp_path: Path) -> None:
    assert refusal(tmp_path / "none.jsonl") == ": cannot be read: No such file or directory"
    assert refusal(tmp_path) == ": cannot be read: Is a directory"


def test_gzip_that_is_cut_off_or_damaged(tmp_path: Path) -> None:
    whole = gzip.compress(b"\n".join([GOOD.encode()] * 2000))
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(whole[:-20])
    assert ": broken gzip data: " in refusal(path)
    path.write_bytes(whole[:2] + b"\xff" * 40)
    assert refusal(path).startswith(":1: broken gzip data: ")


def test_a_wrong_line_ends_a_simulation_without_a_result(written: Write) -> None:
    path = written(GOOD, line(arrival_s=2), "oops")
    with pytest.raises(BadFile, match=r"trace\.jsonl:3: not a JSON object"):
        simulate_serving(read_trace(path), PLAIN, PLENTY, Limits())


@LAWS
@given(st.binary(max_size=200))
def test_any_bytes_are_requests_or_one_line_of_refusal(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    path = tmp_path_factory.mktemp("trace") / "any.jsonl"
    path.write_bytes(content)
    assert refusal(path)


def test_a_long_trace_takes_no_more_memory_than_a_short_one(written: Write) -> None:
    peaks = []
    for count in (2_000, 20_000):
        path = written(*(line(arrival_s=index) for index in range(count)), name=f"{count}.jsonl")
        tracemalloc.start()
        assert sum(1 for _ in read_trace(path)) == count
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.2 * peaks[0] + 10_000
