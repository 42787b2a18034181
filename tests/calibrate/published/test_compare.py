"""Errors are signed and relative to the measurement; tolerances are inclusive; counts claim no interval."""

import msgspec
import pytest
from calibrate.compare import Comparison, compare, summarise

from calibrate.published.cases import Ask, RecordedCase, Row
from calibrate.published.estimates import Estimate, count


def compared(
    answer: Estimate | str,
    *,
    measured: float | tuple[float, float] = 100.0,
    tolerance: float | None = 0.1,
    tolerance_absolute: float | None = None,
    name: str = "row",
) -> Comparison:
    case = RecordedCase(
        id=name,
        figure="decode",
        ask=Ask(ctx_tokens=1),
        tolerance=tolerance,
        tolerance_absolute=tolerance_absolute,
        reason="for a test",
    )
    row = Row(id=name, system="s", metric="decode", value=measured, unit="tok/s", source="nowhere", conditions={})
    return compare(case, row, answer, machine="paper", role="held_out", role_reason="")


def estimate(value: float, *, low: float = 0.0, high: float = 0.0, naive: float | None = None) -> Estimate:
    return Estimate(value=value, low=low or value, high=high or value, naive=naive)


@pytest.mark.parametrize(("predicted", "error"), [(90.0, -0.1), (100.0, 0.0), (150.0, 0.5)])
def test_error_is_signed_and_relative_to_the_measurement(predicted: float, error: float) -> None:
    assert compared(estimate(predicted)).error == pytest.approx(error)


@pytest.mark.parametrize(("predicted", "within"), [(89.9, False), (90.0, True), (110.0, True), (110.1, False)])
def test_the_edge_of_a_tolerance_is_within(predicted: float, within: bool) -> None:
    assert compared(estimate(predicted)).within is within


def test_an_absolute_tolerance_is_told_as_a_share_of_the_measurement() -> None:
    near = compared(estimate(6.8), measured=6.2, tolerance=None, tolerance_absolute=0.6)
    assert near.tolerance == pytest.approx(0.6 / 6.2)
    assert near.within
    assert not compared(estimate(6.81), measured=6.2, tolerance=None, tolerance_absolute=0.6).within


def test_a_tolerance_of_nothing_asks_for_the_number_itself() -> None:
    assert compared(estimate(100.0), tolerance=0.0).within
    assert not compared(estimate(100.0001), tolerance=0.0).within


def test_a_prediction_in_a_published_range_is_within() -> None:
    for predicted, within in ((15.0, True), (16.0, True), (20.0, True), (14.9, False), (20.1, False)):
        case = compared(estimate(predicted), measured=(15.0, 20.0), tolerance=None, tolerance_absolute=2.5)
        assert case.within is within


def test_the_naive_error_is_that_of_the_naive_estimate() -> None:
    assert compared(estimate(100.0, naive=300.0)).naive_error == pytest.approx(2.0)
    assert compared(estimate(100.0)).naive_error is None


def test_no_answer_is_outside_and_says_why() -> None:
    case = compared("does not fit")
    assert (case.predicted, case.low, case.high, case.error, case.within) == (None, None, None, None, False)
    assert case.note == "does not fit"


def test_coverage_counts_only_cases_with_an_interval() -> None:
    summary = summarise(
        [
            compared(estimate(95.0, low=90.0, high=101.0), name="meets"),
            compared(estimate(95.0, low=94.0, high=96.0), name="misses"),
            compared(count(100.0), name="count"),
        ]
    )
    assert (summary.n, summary.with_interval.n) == (3, 2)
    assert summary.coverage_90 == 0.5
    assert summary.with_interval.median_abs_error == pytest.approx(0.05)


def test_coverage_of_a_range_is_to_meet_it() -> None:
    case = compared(estimate(14.0, low=13.0, high=15.5), measured=(15.0, 20.0))
    assert case.covered
    assert not compared(estimate(14.0, low=13.0, high=14.5), measured=(15.0, 20.0)).covered


def test_a_summary_names_median_tail_and_worst() -> None:
    summary = summarise([compared(estimate(100.0 + off), name=f"off by {off}") for off in (0.0, 10.0, -40.0)])
    assert summary.median_abs_error == pytest.approx(0.10)
    assert summary.p95_abs_error == pytest.approx(0.10 + 0.9 * 0.30)
    assert summary.worst == "off by -40.0"
    assert summary.outside == 1


def test_the_worst_of_all_is_no_answer() -> None:
    summary = summarise([compared(estimate(500.0), name="far"), compared("none", name="mute")])
    assert (summary.n, summary.unanswered, summary.outside, summary.worst) == (2, 1, 2, "mute")
    assert summary.median_abs_error == pytest.approx(4.0)


def test_naive_and_twin_are_set_beside_each_other_over_the_same_cases() -> None:
    summary = summarise(
        [
            compared(estimate(101.0, naive=200.0), name="both"),
            compared(estimate(150.0), name="twin alone"),
        ]
    )
    assert summary.naive.n == summary.beside_naive.n == 1
    assert summary.naive.median_abs_error == pytest.approx(1.0)
    assert summary.beside_naive.median_abs_error == pytest.approx(0.01)


def test_a_summary_of_nothing_is_empty() -> None:
    summary = msgspec.to_builtins(summarise([]))
    assert summary["n"] == 0
    assert summary["median_abs_error"] is summary["worst"] is summary["coverage_90"] is None
