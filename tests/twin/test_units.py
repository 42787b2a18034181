"""What people type becomes a number of tokens or bytes; what they read has a unit."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.worlds import LAWS
from twin.errors import BadValue
from twin.units import (
    GIB,
    KIB,
    MAX_TOKENS,
    MIB,
    TIB,
    format_bytes,
    format_seconds,
    parse_bytes,
    parse_link,
    parse_tokens,
)

RIGHT: list[tuple[Callable[[str], int], str, int]] = [
    (parse_tokens, "1,048,576", 1_048_576), (parse_tokens, "256k", 262_144), (parse_tokens, "1M", 1_048_576),
    (parse_tokens, "1.5M", 1_572_864), (parse_tokens, " 4 k ", 4096), (parse_tokens, "1e3", 1000),
    (parse_bytes, "32 mib", 32 * MIB), (parse_bytes, "0.5GiB", GIB // 2), (parse_bytes, "2GB", 2_000_000_000),
    (parse_bytes, "1048576GiB", 2**50), (parse_bytes, "0.1KiB", 102), (parse_bytes, "1.5TB", 1_500_000_000_000),
    (parse_bytes, "1.9B", 1), (parse_bytes, "1675037245", 1_675_037_245), (parse_bytes, "1e10", 10**10),
]  # fmt: skip


@pytest.mark.parametrize(("parse", "text", "number"), RIGHT)
def test_token_counts_and_sizes_are_read_as_people_write_them(
    parse: Callable[[str], int], text: str, number: int
) -> None:
    assert parse(text) == number


WRONG = {
    parse_tokens: (
        "", " ", "k", "one", "0", "-1", "-5k", "0.5", "1.0001k", "2147483648", "2048M", "nan", "inf", "1e400", "1g",
        "1kb", "0x10", "1,5k", "1,50", "12,34,567", ",5k",
    ),
    parse_bytes: (
        "", "32", "1048575", "1048576.5", "32M", "GiB", "0MiB", "-1MiB", "0.0001KiB", "1048577GiB", "1e400GB", "nanGB",
        "1TB!", "1025TiB", "0.9B",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("parse", "text"), [(parse, text) for parse, texts in WRONG.items() for text in texts])
def test_what_is_no_count_or_size_is_refused_by_name(parse: Callable[[str], int], text: str) -> None:
    with pytest.raises(BadValue) as refused:
        parse(text)
    assert repr(text) in str(refused.value)
    assert "\n" not in str(refused.value)


@LAWS
@given(st.integers(min_value=1, max_value=MAX_TOKENS))
def test_any_whole_count_in_range_is_read_exactly(tokens: int) -> None:
    assert [parse_tokens(form) for form in (f"{tokens}", f"{tokens:,}", f"{tokens:_}")] == [tokens] * 3


@LAWS
@given(st.integers(1, 10**4), st.integers(0, 10**6), st.sampled_from([("KiB", KIB), ("GiB", GIB), ("GB", 10**9)]))
def test_what_an_engine_prints_is_rounded_down_to_whole_bytes(whole: int, part: int, unit: tuple[str, int]) -> None:
    assert parse_bytes(f"{whole}.{part:06}{unit[0]}") == (whole * 10**6 + part) * unit[1] // 10**6


@LAWS
@given(st.text("0123456789.,_eE+-kKMGiB ", max_size=2000) | st.integers(101, 6000).map(lambda n: "9" * n + ".5"))
def test_any_text_is_a_number_or_one_short_line(text: str) -> None:
    for parse in (parse_tokens, parse_bytes):
        line = ""
        try:
            assert parse(text) >= 1
        except BadValue as refused:
            line = str(refused)
        assert len(line) < 300


WRITTEN: list[tuple[Callable[[float], str], float, str]] = [
    (format_bytes, 0, "0 B"), (format_bytes, 1023, "1,023 B"), (format_bytes, 27.75 * KIB, "27.75 KiB"),
    (format_bytes, 32 * MIB, "32.0 MiB"), (format_bytes, -2 * GIB, "-2.00 GiB"),
    (format_seconds, 0.0, "0 s"), (format_seconds, 9e-8, "< 0.1 us"), (format_seconds, 46.7e-6, "46.7 us"),
    (format_seconds, 19.72e-3, "19.72 ms"), (format_seconds, 1.0, "1.00 s"), (format_seconds, 120.0, "2.0 min"),
    (format_seconds, 7200.0, "2.0 h"), (format_seconds, 86_400.0 * 365, "8,760.0 h"),
    (format_seconds, 3.15576e9, "100 years"), (format_seconds, 1e300, "3.17e+292 years"),
]  # fmt: skip


@pytest.mark.parametrize(("write", "number", "text"), WRITTEN)
def test_sizes_and_times_are_written_in_the_unit_that_fits(
    write: Callable[[float], str], number: float, text: str
) -> None:
    assert write(number) == text


@LAWS
@given(st.floats(min_value=0, allow_infinity=False, allow_nan=False))
def test_no_time_is_longer_than_a_word_and_none_but_nothing_is_zero(seconds: float) -> None:
    text = format_seconds(seconds)
    assert len(text) < 20
    assert (float(text.removeprefix("< ").split()[0].replace(",", "")) == 0) == (seconds == 0)


@LAWS
@given(st.integers(min_value=1, max_value=2**49))
def test_written_sizes_are_off_by_at_most_half_a_last_digit(size: int) -> None:
    number, unit = format_bytes(size).replace(",", "").split()
    scale = {"B": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": TIB}[unit]
    digit = 10.0 ** -len(number.partition(".")[2])
    assert abs(float(number) - size / scale) <= digit * 0.5001


@pytest.mark.parametrize(
    ("text", "link"),
    [
        ("x16", (None, 16)), ("x1", (None, 1)), ("gen3", (3, 16)), ("gen3x4", (3, 4)), ("Gen4 x8", (4, 8)),
        ("4.0x8", (4, 8)), ("PCIe 5.0 x16", (5, 16)), ("6", (6, 16)),
    ],
)  # fmt: skip
def test_a_link_has_a_generation_or_a_width_or_both(text: str, link: tuple[int | None, int]) -> None:
    assert parse_link(text) == link


@pytest.mark.parametrize("text", ["", "x3", "x32", "gen7", "gen0x4", "gen", "8", "x", "4x8x", "gen3x4 x4", "\n"])
def test_what_is_no_link_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(BadValue, match="is not a PCIe link") as refused:
        parse_link(text)
    assert "\n" not in str(refused.value)
