"""A validation as text: roles apart, whatever is outside marked and explained, walls beside times."""

from typing import Any

import pytest

from calibrate.records import validate_records
from calibrate.validation import TITLES, Comparison, Skipped, validation_of, validation_text
from twin.cost.roofline import WALLS


def case(id_: str, **changes: Any) -> Comparison:
    """Predicted 1.1 s, measured 1 s."""
    values: dict[str, Any] = {
        "machine": "toy", "metric": "decode_step", "unit": "s", "predicted": 1.1, "low": 1.0, "high": 1.2,
        "measured": 1.0, "error": 0.1, "naive_error": -0.5, "role": "held_out", "tolerance": 0.2, "within": True,
        "measured_low": 1.0, "measured_high": 1.0, "tolerance_reason": "because", "wall": "host link (H2D)",
    }  # fmt: skip
    return Comparison(id=id_, **values | changes)


def text_of(*cases: Comparison, skipped: tuple[Skipped, ...] = ()) -> str:
    return validation_text(validation_of("toy", cases, skipped))


def line_of(text: str, id_: str) -> str:
    return next(line for line in text.splitlines() if id_ in line)


def test_rows_that_set_a_rate_stand_apart_from_the_evidence() -> None:
    text = text_of(case("one"), case("two", role="fit"), case("three"))
    held_out, _, fit = text.partition(TITLES["fit"])
    assert TITLES["held_out"] in held_out
    assert all(id_ in held_out for id_ in ("one", "three"))
    assert "two" not in held_out
    assert "two" in fit
    assert "2 rows, 0 outside" in held_out
    assert "1 rows, 0 outside" in fit


def test_a_role_without_rows_is_not_shown() -> None:
    assert TITLES["fit"] not in text_of(case("one"))
    assert TITLES["held_out"] not in text_of(case("one", role="fit"))


def test_only_what_is_outside_is_marked_and_the_end_says_why() -> None:
    text = text_of(case("good"), case("bad", error=0.5, within=False, tolerance_reason="twice the spread"))
    assert "OUTSIDE" in line_of(text, "bad")
    assert "OUTSIDE" not in line_of(text, "good")
    assert text.count("OUTSIDE") == 1
    assert "2 rows, 1 outside" in text
    assert text.endswith("outside their tolerance:\n  bad: twice the spread\n")


def test_all_within_is_said() -> None:
    assert "every case is within its tolerance" in text_of(case("good"))


def test_the_wall_stands_beside_its_time() -> None:
    text = text_of(case("one"), case("two", wall="tensor cores"))
    assert "host link (H2D)" in line_of(text, "one")
    assert "tensor cores" in line_of(text, "two")


def test_errors_are_signed_and_the_naive_estimate_stands_beside() -> None:
    line = line_of(text_of(case("one")), "one")
    assert "+10.0 %" in line
    assert "-50.0 %" in line
    assert "20 %" in line
    assert "1 to 1.2" in line


def test_a_row_without_an_answer_is_dashes_and_outside() -> None:
    none = {"predicted": None, "low": None, "high": None, "error": None, "naive_error": None, "wall": ""}
    text = text_of(case("none", within=False, note="it does not fit", **none), case("good"))
    assert "None" not in text
    assert "OUTSIDE" in line_of(text, "none")
    assert "  none: it does not fit" in text


def test_a_published_range_is_shown_as_one() -> None:
    assert "0.8 to 1.2" in line_of(text_of(case("one", measured_low=0.8, measured_high=1.2, low=1.1, high=1.1)), "one")


def test_rows_that_are_not_predicted_are_counted_with_their_reason() -> None:
    row = Skipped(id="x", system="other", metric="m", status="not_predicted", reason="no rulebook")
    text = text_of(case("one"), skipped=(row, row))
    assert "1 rows predicted, 0 carried, 2 not predicted" in text
    assert "2 x no rulebook" in text


def test_cases_that_were_not_measured_are_listed_each_with_its_reason() -> None:
    rows = [Skipped(id=id_, system="me", metric="m", status="not_measured", reason="too busy") for id_ in ("x", "y")]
    text = text_of(case("one"), skipped=tuple(rows))
    assert "1 rows predicted, 0 carried, 0 not predicted, 2 not measured" in text
    assert "  not measured: x: too busy\n  not measured: y: too busy\n" in text
    assert text.endswith("every case is within its tolerance\n")  # of those that could be judged


@pytest.fixture(scope="module")
def recorded() -> str:
    return validation_text(validate_records())


def test_everything_recorded_has_both_roles_walls_and_totals(recorded: str) -> None:
    assert all(title in recorded for title in TITLES.values())
    assert {"VRAM bandwidth", "host link (H2D)", "tensor cores"} <= {
        wall for wall in WALLS.values() if wall in recorded
    }
    assert "the 90 % interval covers" in recorded
    assert "OUTSIDE" not in recorded
    assert recorded.endswith("every case is within its tolerance\n")


def test_every_recorded_case_has_its_line(recorded: str) -> None:
    lines = recorded.splitlines()
    for shown in validate_records("h200").cases:
        line = next(line for line in lines if line.split()[:1] == [shown.id])
        assert shown.wall
        assert shown.wall in line
