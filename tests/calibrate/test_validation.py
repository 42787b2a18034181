"""Errors are signed and relative, tolerances inclusive, counts claim no interval; text tells roles apart."""

from typing import Any

import pytest
from msgspec.structs import replace

from calibrate.published.cases import Ask, RecordedCase, Row
from calibrate.published.estimates import Estimate, count
from calibrate.published.recorded import compare
from calibrate.records import validate_records
from calibrate.validation import TITLES, Comparison, Skipped, summarise, validation_of, validation_text
from twin.cost.roofline import WALLS


def compared(
    answer: Estimate | str | float,
    *,
    measured: float | tuple[float, float] = 100.0,
    tolerance: float | None = 0.1,
    absolute: float | None = None,
    name: str = "row",
) -> Comparison:
    case = RecordedCase(
        id=name, figure="decode", ask=Ask(ctx_tokens=1), tolerance=None if absolute else tolerance,
        tolerance_absolute=absolute, reason="for a test",
    )  # fmt: skip
    row = Row(id=name, system="s", metric="decode", value=measured, unit="tok/s", source="nowhere", conditions={})
    told = estimate(answer) if isinstance(answer, float) else answer
    return compare(case, row, told, machine="paper", role="held_out", role_reason="")


def estimate(value: float, *, low: float = 0.0, high: float = 0.0, naive: float | None = None) -> Estimate:
    return Estimate(value=value, low=low or value, high=high or value, naive=naive)


@pytest.mark.parametrize(("predicted", "error"), [(90.0, -0.1), (100.0, 0.0), (150.0, 0.5)])
def test_a_case_is_judged_by_its_signed_error_relative_to_the_measurement(predicted: float, error: float) -> None:
    found = compared(estimate(predicted, naive=300.0))
    assert found.error == pytest.approx(error)
    assert found.naive_error == pytest.approx(2.0)
    assert compared(predicted).naive_error is None
    assert compared(6.8, measured=6.2, absolute=0.6).tolerance == pytest.approx(0.6 / 6.2)
    case = compared("does not fit")
    assert (case.predicted, case.low, case.high, case.error, case.within) == (None, None, None, None, False)
    assert case.note == "does not fit"


@pytest.mark.parametrize(
    ("predicted", "asked", "within"),
    [
        (89.9, {}, False), (90.0, {}, True), (110.0, {}, True), (110.1, {}, False),
        (6.8, {"measured": 6.2, "absolute": 0.6}, True), (6.81, {"measured": 6.2, "absolute": 0.6}, False),
        (100.0, {"tolerance": 0.0}, True), (100.0001, {"tolerance": 0.0}, False),
        *((value, {"measured": (15.0, 20.0), "absolute": 2.5}, value not in (14.9, 20.1))
          for value in (14.9, 15.0, 16.0, 20.0, 20.1)),
    ],
)  # fmt: skip
def test_the_edge_of_a_tolerance_or_range_is_within(predicted: float, asked: dict[str, Any], within: bool) -> None:
    assert compared(predicted, **asked).within is within


def test_coverage_is_of_cases_with_an_interval_and_of_a_range_to_meet_it() -> None:
    meets, misses = (estimate(95.0, low=low, high=high) for low, high in ((90.0, 101.0), (94.0, 96.0)))
    summary = summarise([compared(meets), compared(misses), compared(count(100.0))])
    assert (summary.n, summary.with_interval.n, summary.coverage_90) == (3, 2, 0.5)
    assert summary.with_interval.median_abs_error == pytest.approx(0.05)
    for high, covered in ((15.5, True), (14.5, False)):
        assert compared(estimate(14.0, low=13.0, high=high), measured=(15.0, 20.0)).covered is covered


def test_a_summary_names_median_tail_and_worst_which_is_no_answer_where_there_is_none() -> None:
    summary = summarise([compared(100.0 + off, name=f"off by {off}") for off in (0.0, 10.0, -40.0)])
    assert (summary.median_abs_error, summary.p95_abs_error) == pytest.approx((0.10, 0.10 + 0.9 * 0.30))
    assert (summary.worst, summary.outside) == ("off by -40.0", 1)
    summary = summarise([compared(500.0, name="far"), compared("none", name="mute")])
    assert (summary.n, summary.unanswered, summary.outside, summary.worst) == (2, 1, 2, "mute")
    assert summary.median_abs_error == pytest.approx(4.0)
    nothing = summarise([])
    assert (nothing.n, nothing.median_abs_error, nothing.worst, nothing.coverage_90) == (0, None, None, None)


def test_naive_and_twin_are_set_beside_each_other_over_the_same_cases() -> None:
    summary = summarise([compared(estimate(101.0, naive=200.0)), compared(150.0)])
    assert summary.naive.n == summary.beside_naive.n == 1
    assert summary.naive.median_abs_error == pytest.approx(1.0)
    assert summary.beside_naive.median_abs_error == pytest.approx(0.01)


# As text.


def case(id_: str, **changes: Any) -> Comparison:
    """Predicted 1.1 s, measured 1 s."""
    values: dict[str, Any] = {
        "machine": "toy", "metric": "decode_step", "unit": "s", "predicted": 1.1, "low": 1.0, "high": 1.2,
        "measured": 1.0, "error": 0.1, "naive_error": -0.5, "role": "held_out", "tolerance": 0.2, "within": True,
        "measured_low": 1.0, "measured_high": 1.0, "tolerance_reason": "because", "wall": "host link (H2D)",
    }  # fmt: skip
    return Comparison(id=id_, **values | changes)


NONE = {"predicted": None, "low": None, "high": None, "error": None, "naive_error": None, "wall": "", "within": False}


TOLD = """\
toy: predictions against what was recorded

held out: nothing was fitted on these rows
  case   predicted  90 % interval  measured    unit  error    naive    tolerance           wall
  one    1.1        1 to 1.2       1           s     +10.0 %  -50.0 %  20 %                host link (H2D)
  range  1.1        -              0.8 to 1.2  s     +10.0 %  -50.0 %  20 %                tensor cores
  bad    1.1        1 to 1.2       1           s     +50.0 %  -50.0 %  20 %       OUTSIDE  host link (H2D)
  mute   -          -              1           s     -        -        20 %       OUTSIDE

  4 rows, 2 outside; with an interval: n 2, median error 30 %, 95th percentile 48 %, worst bad
  all: n 4, median error 10 %, 95th percentile 46 %, worst mute
  twin beside naive: n 3, median error 10 %, 95th percentile 46 %, worst bad
  naive: n 3, median error 50 %, 95th percentile 50 %, worst one
  the 90 % interval covers 100 % of the rows that have one

fit: rows that set a rate, or repeat one
  case  predicted  90 % interval  measured  unit  error    naive  tolerance    wall
  set   1.1        -              1         s     +10.0 %  -      20 %

  1 rows, 0 outside; with an interval: n 0, median error -, 95th percentile -, worst -
  all: n 1, median error 10 %, 95th percentile 10 %, worst set

notes
  mute: no

5 rows predicted, 0 carried, 2 not predicted, 2 not measured
  2 x no rulebook
  not measured: y: too busy
  not measured: z: too busy

outside their tolerance:
  bad: twice the spread
  mute: no
"""
"""Evidence apart from rows that set a rate; what is outside is marked, and the end says why."""


def test_text_tells_what_is_known_of_each_case_what_they_add_up_to_and_what_was_left_out() -> None:
    cases = [
        case("one"),
        case("range", measured_low=0.8, measured_high=1.2, low=1.1, high=1.1, wall="tensor cores"),
        case("bad", error=0.5, within=False, tolerance_reason="twice the spread"),
        case("mute", note="no", **NONE),
        case("set", role="fit", low=1.1, high=1.1, naive_error=None, wall=""),
    ]
    row = Skipped(id="x", system="me", metric="m", status="not_predicted", reason="no rulebook")
    busy = [replace(row, id=id_, status="not_measured", reason="too busy") for id_ in ("y", "z")]
    assert validation_text(validation_of("toy", cases, (row, row, *busy))) == TOLD
    for role, other in (("fit", "held_out"), ("held_out", "fit")):
        alone = validation_text(validation_of("toy", [case("one", role=role)], busy))
        assert TITLES[role] in alone
        assert TITLES[other] not in alone
        assert alone.endswith("every case is within its tolerance\n")  # of those that could be judged


def test_everything_recorded_has_both_roles_totals_and_a_line_with_its_wall_for_each_case() -> None:
    everything = validate_records()
    recorded = validation_text(everything)
    assert all(title in recorded for title in TITLES.values())
    assert "the 90 % interval covers" in recorded
    assert "OUTSIDE" not in recorded
    lines = {line.split()[0]: line for line in recorded.splitlines() if line.split()}
    assert all(case.wall in lines[case.id] for case in everything.cases)
    own = {case.wall for case in everything.cases if case.machine == "h200"}
    assert {"VRAM bandwidth", "host link (H2D)", "tensor cores"} <= own <= set(WALLS.values())
