"""Rows of a table say what their columns mean; wrong ones are named by their line."""

import io
import itertools
from collections.abc import Iterable
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.worlds import LAWS
from twin.serving.entries import Entry, Wrong
from twin.serving.tables import Table, has_arrivals, table_of

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
DAY = "2023-11-16 18:15:"
BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
HOUSE = "arrival_s,prompt_tokens,output_tokens\n"


def table(text: str, drawn: Iterable[float] = ()) -> Table:
    lines = list(io.BytesIO(text.encode()))
    layout = table_of(lines[0])
    assert layout is not None
    return Table(layout, enumerate(lines, 1), iter(drawn))


def read(text: str) -> list[Entry]:
    return list(table(text).entries())


def refusal(text: str) -> str:
    made = table(text)
    with pytest.raises(Wrong) as refused:
        list(made.entries())
    return f"{made.number}: {refused.value}"


TIMES = "allowed are numbers from 0 to 1e+15"
DATES = "dates such as 2023-11-16 18:15:46.68"
COUNTS = "allowed are whole numbers from 1 to 2,147,483,647"
WRONG = {
    "a cell less": (HOUSE + "1,2\n", "2: has 2 cells, the header has 3"),
    "a cell more": (HOUSE + "1,2,3\n1,2,3,4\n", "3: has 4 cells, the header has 3"),
    "another header": (HOUSE + "1,2,3\n" + AZURE, f'3: arrival_s is "TIMESTAMP", {TIMES}'),
    "no time": (HOUSE + "soon,2,3\n", f'2: arrival_s is "soon", {TIMES}, or {DATES}'),
    "negative time": (HOUSE + "-1,2,3\n", f'2: arrival_s is "-1", {TIMES}, or {DATES}'),
    "NaN": (HOUSE + "1,2,3\nnan,2,3\n", f'3: arrival_s is "nan", {TIMES}'),
    "a number apart": (HOUSE + "1_0,2,3\n", f'2: arrival_s is "1_0", {TIMES}, or {DATES}'),
    "a date among numbers": (HOUSE + f"1,2,3\n{DAY}46,2,3\n", f'3: arrival_s is "{DAY}46", {TIMES}'),
    "a number among dates": (AZURE + f"{DAY}46,2,3\n5,2,3\n", f'3: TIMESTAMP is "5", allowed are {DATES}, as before'),
    "a zone among none": (
        AZURE + f"{DAY}46,2,3\n{DAY}47+00:00,2,3\n",
        f'3: TIMESTAMP "{DAY}47+00:00" has a time zone, unlike the rows before',
    ),
    "an earlier date": (
        AZURE + f"{DAY}46.5,2,3\n{DAY}46.4,2,3\n",
        f"3: TIMESTAMP is {DAY}46.4, before {DAY}46.5 of the request before; sort the trace by arrival",
    ),
    "an earlier number": (
        HOUSE + "2,2,3\n1,2,3\n",
        "3: arrival_s is 1, before 2 of the request before; sort the trace by arrival",
    ),
    "prompt of nothing": (HOUSE + "1,0,3\n", f"2: prompt_tokens is 0, {COUNTS}"),
    "output of nothing": (HOUSE + "1,2,0\n", f"2: output_tokens is 0, {COUNTS}"),
    "half a token": (HOUSE + "1,2.5,3\n", f"2: prompt_tokens is 2.5, {COUNTS}"),
    "no count": (HOUSE + "1,2,\n", f'2: output_tokens is "", {COUNTS}'),
    "endless": (HOUSE + f"1,2,{'9' * 5000}\n", f'2: output_tokens is "{"9" * 36}..., {COUNTS}'),
    "an open quote": (HOUSE + '1,2,"3\n1,2,3\n', "2: a quote is not closed in its line"),
    "an open quote at the end": (HOUSE + '1,2,"3', "2: not CSV: unexpected end of data"),
    "a column twice": ("arrival_s,prompt_tokens,output_tokens,Arrival_S\n", '1: has the column "arrival_s" twice'),
    "two arrivals": (
        "arrival_s,timestamp,prompt_tokens,output_tokens\n",
        "1: has both arrival_s and timestamp, allowed is one of them",
    ),
    "mixed names": ("timestamp,prompt_tokens,output_tokens,output_length\n", "1: has both output_tokens and output_l"),
    "an id twice": ("id," + HOUSE + "a,1,2,3\na,1,2,3\n", '3: id "a" appears twice, allowed is once'),
    "images": (
        "TIMESTAMP,NumImages,ContextTokens,GeneratedTokens\n1,0,5,5\n1,2,5,5\n",
        '3: NumImages is "2", allowed is 0: anything else is not modelled',
    ),
    "a failure elsewhere": (AZURE + "1,5,0\n", f"2: GeneratedTokens is 0, {COUNTS}"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_row_is_named_with_its_column_and_what_is_allowed(name: str) -> None:
    text, says = WRONG[name]
    assert refusal(text).startswith(says)


def test_bytes_that_are_no_text_and_lines_too_long_are_refused() -> None:
    layout = table_of(HOUSE.encode())
    assert layout is not None
    for line, says in ((b"1,2,\xff\n", "not UTF-8"), (b"1" * (2**20 + 1), "the line is longer than")):
        with pytest.raises(Wrong, match=says):
            list(Table(layout, [(1, HOUSE.encode()), (2, line)], iter(())).entries())


def test_columns_may_stand_in_any_order_among_others_in_any_case_with_spaces_and_quotes() -> None:
    text = 'GENERATEDTOKENS, timestamp ,"x, y",contexttokens\r\n\r\n"7", 1.5 ,"a, b",8.0\r\n  \n9,2,,8'
    first, second = read(text)
    assert (first.line, first.arrival, first.prompt_tokens, first.output_tokens) == (3, 1.5, 8, 7)
    assert (second.line, second.arrival, second.id, second.in_seconds) == (5, 2.0, 1, False)
    assert read(HOUSE + "1,2,3\n")[0].in_seconds


def test_dates_count_from_the_first_exactly_to_the_microsecond() -> None:
    rows = [f"{DAY}46.6805900", "2023-11-16T18:15:46.680591", f"{DAY}47", "2023-11-17"]
    entries = read(AZURE + "".join(f"{row},1,1\n" for row in rows))
    assert [entry.arrival for entry in entries] == [0.0, 1e-6, 0.31941, 20653.31941]
    assert all(entry.in_seconds for entry in entries)


def test_failed_requests_of_a_layout_that_has_them_are_left_out_and_counted() -> None:
    made = table(BURST + "5,GPT-4,7,0,7,API log\n6,GPT-4,7,3,10,API log\n7,GPT-4,7,0,7,API log\n")
    (entry,) = made.entries()
    assert (entry.line, entry.id, entry.arrival, made.left_out, made.count) == (3, 0, 6.0, 2, 1)


def test_a_table_without_arrivals_takes_those_that_are_drawn() -> None:
    header = "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n"
    made = table(header + "3772,54,3826,69.85\n" * 3, itertools.count(0.5))
    assert [(entry.arrival, entry.in_seconds) for entry in made.entries()] == [(0.5, True), (1.5, True), (2.5, True)]
    layout = table_of(header.encode())
    assert layout is not None
    assert (has_arrivals(layout, header.encode()), has_arrivals(layout, b"arrived_at," + header.encode())) == (
        False,
        True,
    )


@pytest.mark.parametrize("header", ["", "a,b", "timestamp,contexttokens", '"timestamp', "{}", "\x00,\x00"])
def test_other_headers_are_of_no_layout(header: str) -> None:
    assert table_of(header.encode()) is None


@LAWS
@given(st.text(alphabet='0123456789.,"\n\r- e:+TZ\x00\u0661', max_size=60))
def test_any_rows_are_entries_or_one_refusal(text: str) -> None:
    for header in (HOUSE, AZURE, BURST):
        with suppress(Wrong):
            assert all(entry.prompt_tokens >= 1 and entry.arrival >= 0 for entry in read(header + text))
