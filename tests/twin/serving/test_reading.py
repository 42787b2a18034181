"""What the first lines of a trace say about its units: what is decisive is taken, what is open is asked for."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.worlds import LAWS
from twin.serving.traces import USUAL_HASH_TOKENS, Entry, Reading, Wrong, hash_sizes, understand

NOTHING = Reading()


def entry(**said: Any) -> Entry:
    usual = {"line": 1, "id": 0, "arrival": 0, "in_seconds": False, "prompt_tokens": 48, "output_tokens": 1}
    return Entry(**usual | {"prefix_ids": (), "prefix_tokens": 0, "in_chats": False} | said)


def hashed(tokens: int, hashes: int, **said: Any) -> Entry:
    return entry(prompt_tokens=tokens, prefix_ids=tuple(range(hashes)), **said)


def asked_for(ahead: list[Entry], asked: Reading = NOTHING, *, whole: bool = True) -> Wrong:
    with pytest.raises(Wrong) as refused:
        understand(ahead, asked, whole=whole)
    return refused.value


def test_three_hashes_of_48_tokens_are_of_16() -> None:
    assert hash_sizes([hashed(48, 3)])[0] == [16]


@pytest.mark.parametrize(
    ("lengths", "sizes"),
    [
        ([(6758, 14)], [512]),
        ([(915, 2), (898, 2)], [512]),
        ([(521, 33)], [16]),
        ([(700, 700)], [1]),
        ([(1500, 2), (1601, 3), (800, 1)], [800]),
        ([(100, 1)], [128, 256, 512, 1024, 2048, 4096, 8192]),
        ([(9000, 1)], []),
        ([(1500, 2), (1700, 3)], []),
    ],
)
def test_sizes_are_those_that_every_line_allows(lengths: list[tuple[int, int]], sizes: list[int]) -> None:
    """The last: 750 to 849, of which no number is more usual than another."""
    assert hash_sizes([hashed(*each) for each in lengths])[0] == sizes


PROMPTS = st.lists(st.integers(1, 200_000), min_size=1, max_size=30)


@LAWS
@given(PROMPTS, st.sampled_from(USUAL_HASH_TOKENS))
def test_the_size_that_lengths_were_made_with_is_among_those_left(lengths: list[int], size: int) -> None:
    ahead = [hashed(tokens, math.ceil(tokens / size)) for tokens in lengths if tokens <= 2000 * size]
    assert size in hash_sizes(ahead)[0]


@LAWS
@given(PROMPTS, st.sampled_from(USUAL_HASH_TOKENS[1:]))
def test_unfinished_pieces_may_be_left_out_where_a_line_shows_it(lengths: list[int], size: int) -> None:
    shown = [2 * size - 1, 3 * size]
    ahead = [hashed(tokens, tokens // size) for tokens in [*shown, *lengths] if size <= tokens <= 2000 * size]
    assert hash_sizes(ahead)[0] == [size]


@pytest.mark.parametrize("lengths", [[(5, 10)], [(1030, 3), (2000, 7)], [(100, 1), (100, 2)], [(48, 3), (48, 6)]])
def test_hashes_that_no_size_explains_are_refused_by_their_line(lengths: list[tuple[int, int]]) -> None:
    with pytest.raises(Wrong) as refused:
        hash_sizes([hashed(*each, line=number) for number, each in enumerate(lengths, 7)])
    tokens, hashes = lengths[-1]
    assert refused.value.line == 6 + len(lengths)
    assert str(refused.value).startswith(f"{hashes} hash_ids for {tokens:,} prompt tokens")


def test_the_names_of_bailians_traces_are_in_seconds_and_of_16_tokens() -> None:
    ahead = [hashed(10, 1, in_chats=True), hashed(9, 1, in_chats=True, arrival=60)]
    assert understand(ahead, NOTHING, whole=False) == Reading(time_unit="s", hash_tokens=16)
    long = [hashed(2000, 4, in_chats=True), hashed(2000, 4, in_chats=True, arrival=1)]
    assert understand(long, NOTHING, whole=False) == Reading(time_unit="s", hash_tokens=512)
    assert "--time-unit" in asked_for([ahead[0], hashed(2000, 125, arrival=60)]).hint  # not in all lines


def test_whole_numbers_with_512_tokens_a_hash_are_mooncakes_and_in_milliseconds() -> None:
    ahead = [hashed(6758, 14), hashed(7322, 15, arrival=3000)]
    assert understand(ahead, NOTHING, whole=False) == Reading(time_unit="ms", hash_tokens=512)
    assert "--time-unit" in asked_for([hashed(6758, 14), hashed(7322, 15, arrival=3000.5)]).hint
    assert "--time-unit" in asked_for([hashed(6758, 423), hashed(7322, 458, arrival=3000)]).hint


def test_an_epoch_in_milliseconds_is_none_in_seconds() -> None:
    late = [entry(arrival=1_764_435_600_000), entry(arrival=1_764_435_600_001)]
    assert understand(late, NOTHING, whole=False) == Reading(time_unit="ms")
    asked_for([entry(arrival=1_764_435_600), entry(arrival=1_764_435_601)])


def test_a_key_that_names_its_unit_is_believed() -> None:
    ahead = [entry(in_seconds=True), entry(in_seconds=True, arrival=5)]
    assert understand(ahead, NOTHING, whole=True) == understand(ahead, Reading(time_unit="s"), whole=True)
    refused = asked_for(ahead, Reading(time_unit="ms"))
    assert (str(refused), refused.line) == ("arrival_s is in seconds, not in milliseconds", 0)


def test_requests_that_come_all_at_once_have_no_unit() -> None:
    ahead = [entry(arrival=7), entry(arrival=7)]
    assert understand(ahead, NOTHING, whole=True) == NOTHING
    assert NOTHING.text == "all at once"
    asked_for(ahead, whole=False)  # later ones may come later


def test_what_is_open_is_asked_for_in_one_line_with_what_it_would_mean() -> None:
    refused = asked_for([hashed(100, 1), hashed(90, 1, arrival=60)])
    assert str(refused) == (
        "timestamp may be in seconds or in milliseconds; "
        "hash_ids may stand for 128 or 256 or 512 or 1024 or 2048 or 4096 or 8192 tokens each"
    )
    assert refused.hint == ("--time-unit s or ms: 60 s or ms from the first to the last of 2 requests; --hash-tokens N")
    assert refused.line == 0
    assert "hash_ids may stand for 750 to 849 tokens each" in str(asked_for([hashed(1500, 2), hashed(1700, 3)]))


@pytest.mark.parametrize("unit", ["s", "ms"])
@pytest.mark.parametrize(
    "ahead",
    [
        [hashed(48, 3), hashed(48, 3, arrival=60.0)],
        [hashed(6758, 14), hashed(7322, 15, arrival=3000)],
        [hashed(48, 3, in_chats=True), hashed(48, 3, in_chats=True, arrival=60.0)],
        [entry(arrival=1_764_435_600_000), entry(arrival=1_764_435_600_001)],
    ],
)
def test_an_option_comes_before_what_the_lines_show(ahead: list[Entry], unit: Any) -> None:
    asked = Reading(time_unit=unit, hash_tokens=300)
    assert understand(ahead, asked, whole=True) == asked


@pytest.mark.parametrize(
    ("reading", "text"),
    [
        (Reading(time_unit="s", hash_tokens=16), "in seconds, 16 tokens a hash"),
        (Reading(time_unit="ms", hash_tokens=8192), "in milliseconds, 8,192 tokens a hash"),
        (Reading(time_unit="s"), "in seconds"),
    ],
)
def test_a_reader_is_told_what_was_understood(reading: Reading, text: str) -> None:
    assert reading.text == text
