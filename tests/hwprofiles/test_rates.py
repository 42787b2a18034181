"""Rates and curves: what they may hold, and how a curve is read between and beyond its points."""

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hwprofiles.rates import Counts, Curve, Rate
from tests.worlds import LAWS, curve, rate


@pytest.mark.parametrize(
    ("x", "efficiency", "around"),
    [
        (0.01, 0.2, (1, 1)), (1, 0.2, (1, 1)), (10, 0.5, (1, 100)), (100, 0.8, (100, 100)),
        (math.sqrt(1000 * 100), 0.6, (100, 1000)), (1000, 0.4, (1000, 1000)), (1e9, 0.4, (1000, 1000)),
    ],
)  # fmt: skip
def test_a_curve_is_linear_in_the_logarithm_and_holds_its_ends(
    x: float, efficiency: float, around: tuple[float, float]
) -> None:
    read = curve((1, 100, 1000), (0.2, 0.8, 0.4))
    assert read(x) == pytest.approx(efficiency)
    assert read.around(x) == around


def test_a_curve_covers_what_lies_between_its_ends_and_one_point_claims_no_range() -> None:
    ends = curve((1, 10, 100), (0.1, 0.2, 0.3))
    assert [ends.covers(x) for x in (0.9, 1, 50, 100, 101)] == [False, True, True, True, False]
    single = curve((7,), (0.3,))
    assert all(single(x) == 0.3 and single.covers(x) for x in (1e-9, 1, 7, 1e12))


EFFICIENCY = st.floats(min_value=0.001, max_value=1)
POINTS = st.dictionaries(st.floats(min_value=1e-3, max_value=1e9), EFFICIENCY, min_size=1, max_size=6)


@LAWS
@given(POINTS, st.floats(min_value=1e-6, max_value=1e12))
def test_no_reading_leaves_the_range_of_the_points_around_it(points: dict[float, float], x: float) -> None:
    at = sorted(points)
    drawn = curve(at, [points[place] for place in at])
    assert [drawn(place) for place in at] == pytest.approx([points[place] for place in at])
    left = max((place for place in at if place <= x), default=at[0])
    right = min((place for place in at if place >= x), default=at[-1])
    low, high = sorted((points[left], points[right]))
    assert low * (1 - 1e-9) <= drawn(x) <= high * (1 + 1e-9)


WRONG: list[tuple[type[Rate | Curve], str, tuple[object, ...], str]] = [
    (Rate, "value", (0, -1.0, "5", True, None), r"\$\.value"),
    (Rate, "unit", ("GB/s", ""), r"\$\.unit"),
    (Rate, "spread", (-0.1, 1.1), r"\$\.spread"),
    (Rate, "n", (0, 1.5), r"\$\.n"),
    (Rate, "source", ("guessed",), r"\$\.source"),
    (Rate, "date", ("29.11.2026", "2026-11"), r"\$\.date"),
    (Rate, "source", ("fitted",), "exactly when fitted_on"),
    (Rate, "fitted_on", (["row"],), "exactly when fitted_on"),
    (Rate, "comment", ("x",), "unknown field `comment`"),
    (Curve, "at", ([], [1, 2, 3]), "'at' and 'efficiency' need the same length, at least 1"),
    (Curve, "at", ([10, 1], [1, 1], [1, 1 + 1e-15]), "must rise strictly"),
    (Curve, "at", ([1e-300, 1], [0, 1]), r"\$\.at\[0\]"),
    (Curve, "at", ([1, 1e300],), r"\$\.at\[1\]"),
    (Curve, "efficiency", ([1e-200, 1], [0, 1]), r"\$\.efficiency\[0\]"),
    (Curve, "efficiency", ([0.5, 1.01],), r"\$\.efficiency\[1\]"),
    (Curve, "source", ("fitted",), "exactly when fitted_on"),
    (Curve, "over", (5,), r"\$\.over"),
]
WHOLE: dict[type[Rate | Curve], dict[str, Any]] = {
    Rate: msgspec.to_builtins(rate(5.0, "B/s")),
    Curve: msgspec.to_builtins(curve((1, 10), (0.5, 1))),
}


@pytest.mark.parametrize(("kind", "key", "values", "message"), WRONG)
def test_what_may_not_be_is_refused_by_its_key(
    kind: type[Rate | Curve], key: str, values: tuple[object, ...], message: str
) -> None:
    assert msgspec.convert(WHOLE[kind], kind)
    for value in values:
        with pytest.raises(ValueError, match=message):
            msgspec.convert(WHOLE[kind] | {key: value}, kind)


def test_a_rate_has_provenance_and_a_fitted_one_names_its_rows() -> None:
    for key in ("value", "unit", "spread", "n", "source", "date"):
        with pytest.raises(ValueError, match=f"missing required field `{key}`"):
            msgspec.convert({name: value for name, value in WHOLE[Rate].items() if name != key}, Rate)
    fitted = msgspec.convert(WHOLE[Rate] | {"source": "fitted", "fitted_on": ["blog.decode_1M"]}, Rate)
    assert fitted.fitted_on == ("blog.decode_1M",)


def counts(at: tuple[float, ...], values: tuple[float, ...]) -> Counts:
    return Counts(over="program_rows", at=at, counts=values, spread=0, n=1, source="measured", date="2026-01-01")


def test_counts_are_a_function_linear_between_points_that_goes_on_beyond_the_last() -> None:
    found = counts((16, 32, 48), (2, 4, 5))
    assert [found(x) for x in (1, 16, 24, 32, 40, 48, 64)] == [2, 2, 3, 4, 4.5, 5, 6]
    assert [found.covers(x) for x in (8, 16, 48, 64)] == [False, True, True, False]
    assert counts((16, 32), (4, 2))(64) == 2
    assert counts((16,), (4,))(64) == 4
    for at, values in (((), ()), ((1, 2), (1,)), ((2, 1), (1, 1))):
        with pytest.raises(ValueError, match="at"):
            counts(at, values)


@pytest.mark.parametrize(
    ("at", "spread"),
    [(0.5, 0.02), (1, 0.02), (4, 0.05), (8, 0.05), (16, None), (64, None), (100, None)],
)
def test_share_and_roof_are_known_together_only_between_places_where_both_were_measured_as_one(
    at: float, spread: float | None
) -> None:
    known = {"spread": 0.3, "n": 1, "source": "measured", "date": "2026-12-01"}
    curve = Curve(over="tokens", at=(1, 8, 64), efficiency=(0.5, 0.6, 0.7), spreads=(0.02, 0.05, None), **known)
    assert curve.spread_with_roof(at) == spread


def test_spreads_are_one_for_each_place() -> None:
    known = {"spread": 0.3, "n": 1, "source": "measured", "date": "2026-12-01"}
    with pytest.raises(ValueError, match="spreads"):
        Curve(over="tokens", at=(1, 8), efficiency=(0.5, 0.6), spreads=(0.02,), **known)
