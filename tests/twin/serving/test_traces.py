"""Traces: all spellings, plain or gzipped, of any size, and what is refused with the number of its line."""

import gzip
import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.twin.serving.worlds import GOOD, PLAIN, PLENTY, line
from tests.worlds import LAWS
from twin.errors import BadFile
from twin.serving.engine import simulate_serving
from twin.serving.requests import Limits, Request
from twin.serving.traces import ENTRIES_AHEAD, Reading, read_trace

Write = Callable[..., Path]


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


def test_the_spelling_of_mooncakes_traces(written: Write) -> None:
    lines = (
        '{"timestamp": 27482, "input_length": 1030, "output_length": 52, "hash_ids": [46, 47, 48]}',
        '{"timestamp": 30535, "input_length": 1536, "output_length": 26, "hash_ids": [0, 1, 2]}',
        '{"timestamp": 30535, "input_length": 100, "output_length": 26, "hash_ids": []}',
    )
    readings: list[Reading] = []
    first, second, third = read_trace(written(*lines), understood=readings.append)
    assert readings == [Reading(time_unit="ms", hash_tokens=512)]
    assert (first.prefix_ids, first.prefix_tokens, first.prefix_span) == ((46, 47, 48), 1030, 512)
    assert (second.arrival_s, third.arrival_s) == (pytest.approx(3.053), pytest.approx(3.053))
    assert (second.prefix_ids, second.prefix_tokens) == ((0, 1, 2), 1536)
    assert (third.prefix_ids, third.prefix_tokens, third.prefix_span) == ((), 0, 0)


def test_the_spelling_of_bailians_traces(written: Write) -> None:
    chat = {"chat_id": 159, "parent_chat_id": -1, "type": "text", "turn": 1}
    lines = [
        json.dumps(chat | {"timestamp": at, "input_length": 48, "output_length": 20, "hash_ids": [11, 12, last]})
        for at, last in ((0.0, 13), (61.114, 14))
    ]
    readings: list[Reading] = []
    first, second = read_trace(written(*lines), understood=readings.append)
    assert readings == [Reading(time_unit="s", hash_tokens=16)]
    assert (first.prefix_ids, first.prefix_tokens, first.prefix_span) == ((11, 12, 13), 48, 16)
    assert second.arrival_s == pytest.approx(61.114)


def hashed(tokens: int, hashes: int, at: float = 0) -> str:
    ids = list(range(hashes))
    return json.dumps({"timestamp": at, "input_length": tokens, "output_length": 1, "hash_ids": ids})


def test_what_an_option_says_comes_before_what_the_lines_show(written: Write) -> None:
    path = written(hashed(1030, 3), hashed(700, 2, at=60))
    by_option = Reading(time_unit="s", hash_tokens=500)
    assert [each.arrival_s for each in read_trace(path)] == [0.0, pytest.approx(0.06)]
    assert [(each.arrival_s, each.prefix_span) for each in read_trace(path, by_option)] == [(0.0, 500), (60.0, 500)]


def test_a_line_whose_hashes_contradict_its_length_is_refused_by_its_number(written: Write) -> None:
    """Among the lines that are looked at ahead, and after them."""
    first, usual = hashed(1030, 3), hashed(700, 2)
    for hashes in (1, 7):
        wrong = f"{hashes} hash_ids for 2,000 prompt tokens, "
        early = refusal(written(first, hashed(2000, hashes)))
        assert early == f":2: {wrong}where the lines before mean 344 to 514 tokens each"
        late = written(first, *[usual] * ENTRIES_AHEAD, hashed(2000, hashes))
        assert refusal(late) == f":{ENTRIES_AHEAD + 2}: {wrong}allowed are 4 of 512 tokens each"


def test_hashes_that_come_late_need_an_option(written: Write) -> None:
    plain = line(hash_ids=[])
    path = written(*[plain] * ENTRIES_AHEAD, line(hash_ids=[1]))
    assert refusal(path) == f":{ENTRIES_AHEAD + 1}: the first hash_ids come too late to tell what they stand for"
    assert len(list(read_trace(path, Reading(hash_tokens=16)))) == ENTRIES_AHEAD + 1


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


def test_a_wrong_line_is_named_by_file_and_number(written: Write) -> None:
    assert refusal(written(GOOD, "", line(arrival_s="1"), GOOD)).startswith(':3: arrival_s is "1", allowed are ')
    at_once = [line(arrival_s=1)] * ENTRIES_AHEAD
    assert refusal(written(*at_once, "oops")).startswith(f":{ENTRIES_AHEAD + 1}: not a JSON object")


def test_a_last_line_that_is_cut_off(written: Write) -> None:
    path = written(GOOD, GOOD[:30], end=b"")
    assert refusal(path) == ":2: not a JSON object: Input data was truncated; the file ends here"


@pytest.mark.parametrize("lines", [(), ("",), ("", "  ", "\t")])
def test_a_file_without_requests(written: Write, lines: tuple[str, ...]) -> None:
    assert refusal(written(*lines)) == ": holds no requests"


def test_an_empty_file(tmp_path: Path) -> None:
    path = tmp_path / "empty.jsonl"
    path.touch()
    assert refusal(path) == ": holds no requests"


def test_what_is_no_file(tmp_path: Path) -> None:
    assert refusal(tmp_path / "none.jsonl") == ": cannot be read: No such file or directory"
    assert refusal(tmp_path) == ": a folder, not a trace of JSON lines"


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
