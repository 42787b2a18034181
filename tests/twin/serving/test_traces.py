"""A trace is read as its lines say, and whatever is wrong with it is refused by file and line."""

import gzip
import itertools
import json
import math
import tracemalloc
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.twin.serving import samples
from tests.twin.serving.worlds import GOOD, Affine, PagedPool, line, serve
from tests.worlds import LAWS
from twin.errors import BadFile, Impossible
from twin.serving import traces
from twin.serving.entries import Entry, Wrong
from twin.serving.requests import Request
from twin.serving.traces import Lacks, Reading

NOTHING = Reading()


def entry(**said: Any) -> Entry:
    usual = {"line": 1, "id": 0, "arrival": 0, "in_seconds": False, "prompt_tokens": 48, "output_tokens": 1}
    return Entry(**usual | {"prefix_ids": (), "prefix_tokens": 0, "in_chats": False} | said)


def entry_of_hashes(tokens: int, hashes: int, **said: Any) -> Entry:
    return entry(prompt_tokens=tokens, prefix_ids=tuple(range(hashes)), **said)


def asked_for(ahead: list[Entry], asked: Reading = NOTHING, *, whole: bool = True) -> Wrong:
    with pytest.raises(Wrong) as refused:
        traces.understand(ahead, asked, whole=whole)
    return refused.value


@pytest.mark.parametrize(
    ("lengths", "sizes"),
    [([(48, 3)], [16]), ([(915, 2), (898, 2)], [512]), ([(521, 33)], [16]), ([(700, 700)], [1]),
     ([(1500, 2), (1601, 3), (800, 1)], [800]), ([(100, 1)], [128, 256, 512, 1024, 2048, 4096, 8192]),
     ([(9000, 1)], []), ([(1500, 2), (1700, 3)], [])],
)  # fmt: skip
def test_sizes_are_those_that_every_line_allows(lengths: list[tuple[int, int]], sizes: list[int]) -> None:
    """The last: 750 to 849, of which no number is more usual than another."""
    assert traces.hash_sizes([entry_of_hashes(*each) for each in lengths])[0] == sizes


@LAWS
@given(st.lists(st.integers(1, 200_000), min_size=1, max_size=30), st.sampled_from(traces.USUAL_HASH_TOKENS))
def test_the_size_that_lengths_were_made_with_is_among_those_left(lengths: list[int], size: int) -> None:
    """Pieces that are not finished may be left out where a line shows it."""
    lengths = [tokens for tokens in lengths if tokens <= 2000 * size]
    assert size in traces.hash_sizes([entry_of_hashes(tokens, math.ceil(tokens / size)) for tokens in lengths])[0]
    if size > 1:
        shown = [2 * size - 1, 3 * size, *(tokens for tokens in lengths if tokens >= size)]
        assert traces.hash_sizes([entry_of_hashes(tokens, tokens // size) for tokens in shown])[0] == [size]


@pytest.mark.parametrize("lengths", [[(5, 10)], [(1030, 3), (2000, 7)], [(100, 1), (100, 2)], [(48, 3), (48, 6)]])
def test_hashes_that_no_size_explains_are_refused_by_their_line(lengths: list[tuple[int, int]]) -> None:
    with pytest.raises(Wrong) as refused:
        traces.hash_sizes([entry_of_hashes(*each, line=number) for number, each in enumerate(lengths, 7)])
    tokens, hashes = lengths[-1]
    assert refused.value.line == 6 + len(lengths)
    assert str(refused.value).startswith(f"{hashes} hash_ids for {tokens:,} prompt tokens")


def two(tokens: int, hashes: int, last: float, **said: Any) -> list[Entry]:
    """Requests of so many tokens and hashes at 0 and at `last`."""
    return [entry_of_hashes(tokens, hashes, **said), entry_of_hashes(tokens, hashes, arrival=last, **said)]


def epoch(first: int) -> list[Entry]:
    return [entry(arrival=first), entry(arrival=first + 1)]


UNDERSTOOD = {
    "Bailian's are in seconds, of 16 tokens": (two(10, 1, 60, in_chats=True), Reading(time_unit="s", hash_tokens=16)),
    "or of as many as lengths say": (two(2000, 4, 1, in_chats=True), Reading(time_unit="s", hash_tokens=512)),
    "Mooncake's have 512 and are in milliseconds": (two(6758, 14, 3000), Reading(time_unit="ms", hash_tokens=512)),
    "an epoch in milliseconds is none in seconds": (epoch(1_764_435_600_000), Reading(time_unit="ms")),
}
OPEN = {
    "names not in all lines": [two(10, 1, 0, in_chats=True)[0], entry_of_hashes(2000, 125, arrival=60)],
    "512 tokens and broken milliseconds": two(6758, 14, 3000.5),
    "milliseconds and 16 tokens": two(6758, 423, 3000),
    "an epoch in seconds": epoch(1_764_435_600),
}


@pytest.mark.parametrize("name", UNDERSTOOD)
def test_what_lines_show_is_understood_unless_an_option_says_otherwise(name: str) -> None:
    ahead, meant = UNDERSTOOD[name]
    assert traces.understand(ahead, NOTHING, whole=False) == meant
    for unit in ("s", "ms"):
        asked = Reading(time_unit=unit, hash_tokens=300)  # type: ignore[arg-type]
        assert traces.understand(ahead, asked, whole=True) == asked


@pytest.mark.parametrize("name", OPEN)
def test_what_lines_leave_open_is_asked_for(name: str) -> None:
    assert "--time-unit" in asked_for(OPEN[name]).hint


def test_requests_that_come_all_at_once_have_no_unit_and_a_key_that_names_it_is_believed() -> None:
    at_once = [entry(arrival=7), entry(arrival=7)]
    assert traces.understand(at_once, NOTHING, whole=True) == NOTHING
    assert NOTHING.text == "all at once"
    asked_for(at_once, whole=False)  # later ones may come later
    named = [entry(in_seconds=True), entry(in_seconds=True, arrival=5)]
    assert traces.understand(named, NOTHING, whole=True) == traces.understand(
        named, traces.Reading(time_unit="s"), whole=True
    )
    refused = asked_for(named, traces.Reading(time_unit="ms"))
    assert (str(refused), refused.line) == ("arrival_s is in seconds, not in milliseconds", 0)


def test_what_is_open_is_asked_for_in_one_line_with_what_it_would_mean() -> None:
    refused = asked_for([entry_of_hashes(100, 1), entry_of_hashes(90, 1, arrival=60)])
    assert str(refused) == (
        "timestamp may be in seconds or in milliseconds; "
        "hash_ids may stand for 128 or 256 or 512 or 1024 or 2048 or 4096 or 8192 tokens each"
    )
    assert refused.hint == ("--time-unit s or ms: 60 s or ms from the first to the last of 2 requests; --hash-tokens N")
    assert refused.line == 0
    assert "hash_ids may stand for 750 to 849 tokens each" in str(
        asked_for([entry_of_hashes(1500, 2), entry_of_hashes(1700, 3)])
    )


def test_what_a_layout_is_known_to_have_needs_no_option_but_one_wins() -> None:
    numbers = [entry(arrival=5.0), entry(arrival=45.0)]
    assert traces.understand(numbers, NOTHING, whole=True, documented="s").time_unit == "s"
    assert traces.understand(numbers, Reading(time_unit="ms"), whole=True, documented="s").time_unit == "ms"


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
        list(traces.read_trace(path))
    assert "\n" not in str(caught.value)
    return str(caught.value).removeprefix(str(path))


def test_the_house_spelling_in_seconds(written: Write) -> None:
    first = line(id="a", arrival_s=100.5, prompt_tokens=7, output_tokens=3, prefix_id="p", prefix_tokens=4)
    second = line(arrival_s=102, prompt_tokens=8.0, output_tokens=1, user={"any": "thing"})
    assert list(traces.read_trace(written(first, "", "  ", second))) == [
        Request(id="a", arrival_s=0.0, prompt_tokens=7, output_tokens=3, prefix_ids=("p",), prefix_tokens=4, line=1),
        Request(id=1, arrival_s=1.5, prompt_tokens=8, output_tokens=1, line=4),
    ]
    epoch = [line(arrival_s=..., timestamp=1_764_435_600_000 + offset) for offset in (0, 1, 1001)]
    assert [each.arrival_s for each in traces.read_trace(written(*epoch))] == [
        0.0,
        0.001,
        pytest.approx(1.001, rel=1e-12),
    ]


def test_the_spelling_of_mooncakes_traces(written: Write) -> None:
    lines = (
        '{"timestamp": 27482, "input_length": 1030, "output_length": 52, "hash_ids": [46, 47, 48]}',
        '{"timestamp": 30535, "input_length": 1536, "output_length": 26, "hash_ids": [0, 1, 2]}',
        '{"timestamp": 30535, "input_length": 100, "output_length": 26, "hash_ids": []}',
    )
    readings: list[Reading] = []
    first, second, third = traces.read_trace(written(*lines), understood=readings.append)
    assert readings == [Reading(time_unit="ms", hash_tokens=512)]
    assert (first.prefix_ids, first.prefix_tokens, first.prefix_span) == ((46, 47, 48), 1030, 512)
    assert (second.arrival_s, third.arrival_s) == (pytest.approx(3.053), pytest.approx(3.053))
    assert (second.prefix_ids, second.prefix_tokens) == ((0, 1, 2), 1536)
    assert (third.prefix_ids, third.prefix_tokens, third.prefix_span) == ((), 0, 0)


def hashed(tokens: int, hashes: int, at: float = 0) -> str:
    ids = list(range(hashes))
    return json.dumps({"timestamp": at, "input_length": tokens, "output_length": 1, "hash_ids": ids})


def test_a_line_whose_hashes_contradict_its_length_or_come_late_is_refused_by_its_number(written: Write) -> None:
    """Among the lines that are looked at ahead, and after them."""
    first, usual = hashed(1030, 3), hashed(700, 2)
    for hashes in (1, 7):
        wrong = f"{hashes} hash_ids for 2,000 prompt tokens, "
        early = refusal(written(first, hashed(2000, hashes)))
        assert early == f":2: {wrong}where the lines before mean 344 to 514 tokens each"
        late = written(first, *[usual] * traces.ENTRIES_AHEAD, hashed(2000, hashes))
        assert refusal(late) == f":{traces.ENTRIES_AHEAD + 2}: {wrong}allowed are 4 of 512 tokens each"
    plain = line(hash_ids=[])
    path = written(*[plain] * traces.ENTRIES_AHEAD, line(hash_ids=[1]))
    assert refusal(path) == f":{traces.ENTRIES_AHEAD + 1}: the first hash_ids come too late to tell what they stand for"
    assert len(list(traces.read_trace(path, Reading(hash_tokens=16)))) == traces.ENTRIES_AHEAD + 1


@pytest.mark.parametrize("end", [b"\n", b"", b"\r\n", b"\n\n\n"])
@pytest.mark.parametrize("pack", [bytes, gzip.compress, b"\xef\xbb\xbf".__add__], ids=["plain", "gzip", "with a mark"])
def test_the_last_line_may_end_anyhow_and_gzip_and_a_byte_order_mark_are_known(
    written: Write, end: bytes, pack: Callable[[bytes], bytes]
) -> None:
    assert len(list(traces.read_trace(written(pack(f"{GOOD}\n{GOOD}".encode() + end), end=b"")))) == 2


def test_published_lines_say_what_they_say(tmp_path: Path) -> None:
    for name, sample in samples.TRACES.items():
        path = tmp_path / "trace"
        path.write_bytes(sample.text.encode())
        assert traces.lacks_of(path) == Lacks()
        requests = list(traces.read_trace(path))
        lengths = [(each.prompt_tokens, each.output_tokens) for each in requests]
        assert lengths == [said[1:] for said in sample.said], name
        assert [each.arrival_s for each in requests] == pytest.approx([said[0] for said in sample.said], abs=1e-9)


def test_published_prompts_need_arrivals_and_characters_a_token(tmp_path: Path) -> None:
    for name, sample in samples.PROMPTS.items():
        path = tmp_path / "prompts"
        path.write_bytes(sample.text.encode())
        assert traces.lacks_of(path) == Lacks(arrivals=True, tokens=True)
        assert "which says nothing of arrivals and tokens" in refusal(path)
        told: list[Reading] = []
        asked = Reading(chars_per_token=4.0, arrivals="drawn")
        requests = list(traces.read_trace(path, asked, drawn=lambda: itertools.count(0.0, 0.5), understood=told.append))
        said = [(each.arrival_s, each.prompt_tokens, each.output_tokens) for each in requests]
        assert said == sample.said, name
        assert told[-1].text.startswith("drawn; a") or told[-1].text.startswith("drawn; an")
        assert "; tokens estimated at 4 characters each" in told[-1].text
        assert ("conversations without question and reply left out: 1" in told[-1].text) == (name == "sharegpt")


def test_arrivals_are_not_drawn_where_a_trace_has_them_and_its_unit_not_asked_where_there_is_none(
    tmp_path: Path,
) -> None:
    path = tmp_path / "trace"
    path.write_text(samples.TRACES["azure 2023"].text, encoding="utf-8")
    with pytest.raises(Impossible, match="--rate means nothing beside --trace-in"):
        list(traces.read_trace(path, drawn=itertools.count))
    for asked, option in (
        (Reading(chars_per_token=4.0), "chars-per-token"),
        (Reading(output_tokens=4), "output-tokens"),
    ):
        with pytest.raises(Impossible, match=f"--{option} means nothing beside this trace: it counts tokens"):
            list(traces.read_trace(path, asked))
    with pytest.raises(BadFile, match="arrivals are dates, so that there is no unit"):
        list(traces.read_trace(path, Reading(time_unit="s")))
    path.write_text(samples.PROMPTS["vllm"].text, encoding="utf-8")
    with pytest.raises(BadFile, match="it says nothing of arrivals, so that there is no unit"):
        list(traces.read_trace(path, Reading(time_unit="s", chars_per_token=4.0), drawn=itertools.count))


WORKLOADS = st.lists(
    st.tuples(st.integers(0, 10**6), st.integers(1, 2000), st.integers(1, 50)), min_size=1, max_size=12
)


def in_every_layout(workload: list[tuple[int, int, int]]) -> dict[str, str]:
    """The same requests, whose times are in milliseconds."""
    rows = sorted(workload)
    start = datetime(2024, 5, 10, tzinfo=UTC)

    def table(header: str, form: str) -> str:
        cells = ((ms / 1000, prompt, output, start + timedelta(milliseconds=ms)) for ms, prompt, output in rows)
        return "\n".join([header, *(form.format(*each) for each in cells)])

    def lines(**keys: str) -> str:
        said = ({"s": ms / 1000, "ms": ms, "prompt": prompt, "output": output} for ms, prompt, output in rows)
        return "\n".join(json.dumps({name: each[what] for name, what in keys.items()}) for each in said)

    return {
        "azure": table("TIMESTAMP,ContextTokens,GeneratedTokens", "{3},{1},{2}"),
        "burstgpt": table("Timestamp,Model,Request tokens,Response tokens,Total tokens", "{0},GPT-4,{1},{2},9"),
        "splitwise": table("arrival_timestamp,batch_size,prompt_size,token_size", "{0},1,{1},{2}"),
        "vidur": table("arrived_at,num_prefill_tokens,num_decode_tokens", "{0},{1}.0,{2}"),
        "house table": table("output_tokens,prompt_tokens,arrival_s", "{2},{1},{0}"),
        "house lines": lines(arrival_s="s", prompt_tokens="prompt", output_tokens="output"),
        "mooncake": lines(timestamp="ms", input_length="prompt", output_length="output"),
    }


@LAWS
@given(WORKLOADS, st.sampled_from([bytes, gzip.compress]))
def test_the_same_workload_in_any_layout_is_the_same_simulation(
    tmp_path_factory: pytest.TempPathFactory, workload: list[tuple[int, int, int]], pack: Callable[[bytes], bytes]
) -> None:
    path = tmp_path_factory.mktemp("trace") / "trace"
    found = {}
    for name, text in in_every_layout(workload).items():
        path.write_bytes(pack(text.encode()))
        requests = list(traces.read_trace(path, Reading(time_unit="ms") if name == "mooncake" else NOTHING))
        at = [round(each.arrival_s * 1000) for each in requests]
        assert [each.arrival_s for each in requests] == pytest.approx([ms / 1000 for ms in at], abs=1e-9)
        exact = [replace(each, arrival_s=ms / 1000, line=0) for each, ms in zip(requests, at, strict=True)]
        costs = Affine(fixed_s=0.01, token_s=1e-6, row_s=1e-5)
        served = serve(exact, costs=costs, pool=PagedPool(blocks=400, block_tokens=16), batched_tokens=2048)
        found[name] = (exact, served.total_s, served.ttft_s.summary())
    first = found["house lines"]
    assert len(first[0]) == len(workload)
    assert all(each == first for each in found.values())


def test_a_list_of_another_layout_is_named(written: Write) -> None:
    assert refusal(written('[{"arrival_s": 1}]')) == ": a JSON list of another layout than ShareGPT's"
    assert refusal(written("[]")) == ": a list of ShareGPT conversations, which says nothing of arrivals and tokens"
    drawn = partial(traces.read_trace, drawn=itertools.count)
    with pytest.raises(BadFile, match="holds no requests"):
        list(drawn(written("[]"), Reading(chars_per_token=4.0)))


def test_a_wrong_row_of_a_table_or_prompt_is_named_by_file_and_number(written: Write) -> None:
    header = "TIMESTAMP,ContextTokens,GeneratedTokens"
    assert refusal(written(header)) == ": holds no requests"
    assert refusal(written("", header, "1,2,3", "", "1,2,x")).startswith(
        ':5: GeneratedTokens is "x", allowed are whole '
    )
    late = written("arrival_s,prompt_tokens,output_tokens", *["1,2,3"] * traces.ENTRIES_AHEAD, "1,2")
    assert refusal(late) == f":{traces.ENTRIES_AHEAD + 2}: has 2 cells, the header has 3"
    assert refusal(written(header, "1,2,3", "61,2,3")) == ": timestamp may be in seconds or in milliseconds"
    assert refusal(written("a,b,c", "1,2,3")) == ": a CSV file, not a trace of requests"
    for wrong, says in (("{", ":3: not JSON: "), ('{"prompt": 1.5}', ":3: prompt is 1.5, allowed are ")):
        path = written('{"prompt": "a"}', '{"prompt": "b"}', wrong)
        asked = Reading(chars_per_token=4.0, output_tokens=5)
        with pytest.raises(BadFile) as refused:
            list(traces.read_trace(path, asked, drawn=itertools.count))
        assert str(refused.value).removeprefix(str(path)).startswith(says)


def test_what_cannot_be_read_lacks_nothing(written: Write, tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere", written("oops"), written("[oops"), written(b"\x28\xb5\x2f\xfdoops")):
        assert traces.lacks_of(path) == Lacks()


def test_what_is_wrong_is_named_by_file_and_number(written: Write, tmp_path: Path) -> None:
    assert refusal(written(GOOD, "", line(arrival_s="1"), GOOD)).startswith(':3: arrival_s is "1", allowed are ')
    at_once = [line(arrival_s=1)] * traces.ENTRIES_AHEAD
    assert refusal(written(*at_once, "oops")).startswith(f":{traces.ENTRIES_AHEAD + 1}: not a JSON object")
    for empty in ((), ("",), ("", "  ", "\t")):
        assert refusal(written(*empty)) == ": holds no requests"
    assert refusal(tmp_path / "none.jsonl") == ": cannot be read: No such file or directory"
    assert refusal(tmp_path) == ": a folder, not a trace of requests"
    whole = gzip.compress(b"\n".join([GOOD.encode()] * 2000))
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(whole[:-20])
    assert ": broken gzip data: " in refusal(path)
    path.write_bytes(whole[:2] + b"\xff" * 40)
    assert refusal(path).startswith(":1: broken gzip data: ")


@LAWS
@given(st.binary(max_size=200))
def test_any_bytes_are_requests_or_one_line_of_refusal(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    path = tmp_path_factory.mktemp("trace") / "any.jsonl"
    path.write_bytes(content)
    assert refusal(path)


@pytest.mark.parametrize("form", ["lines", "table", "list"])
def test_a_long_trace_takes_no_more_memory_than_a_short_one(written: Write, form: str) -> None:
    peaks = []
    for count in (2_000, 16_000):
        if form == "lines":
            path = written(*(line(arrival_s=index) for index in range(count)), name=f"{count}.jsonl")
        elif form == "table":
            rows = (f"{index},10,5" for index in range(count))
            path = written("arrival_s,prompt_tokens,output_tokens", *rows, name=f"{count}.csv")
        else:
            one = '{"conversations": [{"value": "Who are you?"}, {"value": "A model of some kind."}]}'
            path = written("[" + ",\n".join([one] * count) + "]", name=f"{count}.json")
        asked = Reading(chars_per_token=4.0) if form == "list" else NOTHING
        drawn = itertools.count if form == "list" else None
        tracemalloc.start()
        assert sum(1 for _ in traces.read_trace(path, asked, drawn=drawn)) == count
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.2 * peaks[0] + 10_000
