"""Measurements as a data file: read strictly, refused in one line, merged row by row, written back as they were."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from calibrate.measurements import (
    NAME,
    SCHEMA,
    LeftOutRow,
    MeasuredRow,
    Measurements,
    measured_machines,
    merged,
    read_measurements,
    row_of,
    shipped_measurements,
    to_text,
)
from calibrate.operations.table import Case
from hwprofiles.errors import BadFile

STEP = Case(operation="decode_step", at={"tier": "host", "ctx_tokens": 6_145, "layers": 12})
GATHER = Case(operation="decode_gather", at={"tier": "vram", "ctx_tokens": 6_145, "layers": 12})
Change = Callable[[dict[str, Any]], object]


def row(case: Case, median_s: float = 1e-3, **changes: Any) -> MeasuredRow:
    values: dict[str, Any] = {"spread": 0.01, "samples_s": (median_s,) * 3, "error": 1e-4, "link_bytes": 0}
    return MeasuredRow(case=case, median_s=median_s, **values | changes)


def measurements(*rows: MeasuredRow, **changes: Any) -> Measurements:
    values: dict[str, Any] = {"machine": "toy", "kv_dtype": "fp16", "made": {"grid": {"code": "a"}}}
    return Measurements(schema=SCHEMA, rows=rows, **values | changes)


def changed(path: Path, change: Change) -> Path:
    plain = json.loads(to_text(measurements(row(STEP), row(GATHER))))
    change(plain)
    path.write_text(json.dumps(plain), encoding="utf-8")
    return path


def first(plain: dict[str, Any]) -> Any:
    return plain["rows"][0]


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    whole = measurements(
        row(STEP),
        row(GATHER, link_bytes=5),
        row(STEP, group="long_curve"),
        left_out=(LeftOutRow(case=STEP, reason="x"),),
    )
    path = tmp_path / NAME
    path.write_text(to_text(whole), encoding="utf-8")
    assert read_measurements(path) == whole
    assert to_text(read_measurements(path)) == path.read_text(encoding="utf-8")


def test_the_shipped_file_is_what_it_would_be_written_as() -> None:
    assert "h200" in measured_machines()
    for machine in measured_machines():
        shipped = shipped_measurements(machine)
        assert shipped.machine == machine
        assert shipped.rows


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda plain: plain.update(extra=1), "extra"),
        (lambda plain: first(plain).update(extra=1), "extra"),
        (lambda plain: plain.pop("kv_dtype"), "kv_dtype"),
        (lambda plain: first(plain).pop("median_s"), "median_s"),
        (lambda plain: first(plain)["case"]["at"].pop("ctx_tokens"), "ctx_tokens"),
        (lambda plain: plain.update(rows=plain["rows"] * 2), "appears twice"),
        (lambda plain: plain.update(schema="twin.measurements/1"), "schema"),
        (lambda plain: first(plain).update(median_s=float("nan")), "median_s"),
        (lambda plain: first(plain).update(error=float("inf")), "error"),
        (lambda plain: first(plain).update(median_s=0), "median_s"),
        (lambda plain: first(plain).update(link_bytes=-1), "link_bytes"),
        (lambda plain: first(plain).update(median_s="1 ms"), "median_s"),
        (lambda plain: first(plain).update(samples_s=[1e-3, 0]), "samples_s"),
        (lambda plain: first(plain).update(group="short_curve"), "group"),
        (lambda plain: first(plain)["case"].update(operation="decode"), "unknown operation 'decode'"),
        (lambda plain: first(plain)["case"]["at"].update(rows=10**9), "no parameter rows"),
        (lambda plain: first(plain)["case"]["at"].update(tier="disk"), "tier is 'disk'"),
        (lambda plain: plain.update(made={"short_curve": {}}), "made"),
        (lambda plain: plain.update(left_out=[{"case": first(plain)["case"]}]), "reason"),
    ],
)
def test_a_file_that_is_wrong_is_refused_in_one_line_by_its_key(tmp_path: Path, change: Change, told: str) -> None:
    path = changed(tmp_path / NAME, change)
    with pytest.raises(BadFile) as refused:
        read_measurements(path)
    assert told in refused.value.message
    assert str(path) in refused.value.message
    assert "\n" not in str(refused.value)


def test_a_key_that_no_case_has_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadFile, match="ctx_token_s"):
        read_measurements(changed(tmp_path / NAME, lambda plain: first(plain)["case"]["at"].update(ctx_token_s=1)))


def test_one_case_may_stand_in_the_grid_and_on_the_curve(tmp_path: Path) -> None:
    path = changed(tmp_path / NAME, lambda plain: plain["rows"].append(first(plain) | {"group": "long_curve"}))
    assert len(read_measurements(path).rows) == 3


@pytest.mark.parametrize("kept", [0, 1, 40, -2])
def test_a_truncated_file_is_refused_in_one_line(tmp_path: Path, kept: int) -> None:
    path = tmp_path / NAME
    path.write_text(to_text(measurements(row(STEP)))[:kept], encoding="utf-8")
    with pytest.raises(BadFile) as refused:
        read_measurements(path)
    assert "\n" not in str(refused.value)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadFile, match="cannot be read"):
        read_measurements(tmp_path / NAME)


def test_a_case_measured_again_replaces_its_row_and_the_others_stay() -> None:
    old = measurements(row(STEP, 1e-3), row(GATHER, 2e-3))
    both = merged(old, measurements(row(STEP, 5e-3), made={"formats": {"code": "b"}}))
    assert {kept.case.id: kept.median_s for kept in both.rows} == {STEP.id: 5e-3, GATHER.id: 2e-3}
    assert both.made == {"grid": {"code": "a"}, "formats": {"code": "b"}}


def test_rows_of_a_group_that_other_code_is_measured_for_now_go() -> None:
    old = measurements(row(STEP, 1e-3), row(GATHER, 2e-3), row(GATHER, group="long_curve"))
    both = merged(old, measurements(row(STEP, 5e-3), made={"grid": {"code": "b"}}))
    assert [(kept.group, kept.median_s) for kept in both.rows] == [("long_curve", 1e-3), ("grid", 5e-3)]


def test_a_row_of_the_curve_does_not_replace_that_of_the_grid() -> None:
    both = merged(measurements(row(STEP, 1e-3)), measurements(row(STEP, 5e-3, group="long_curve")))
    assert [(kept.group, kept.median_s) for kept in both.rows] == [("grid", 1e-3), ("long_curve", 5e-3)]


def test_without_an_old_file_or_with_one_of_another_machine_the_new_rows_stand_alone() -> None:
    new = measurements(row(STEP))
    assert merged(None, new) == new
    assert merged(measurements(row(GATHER), machine="other"), new) == new


def test_merging_twice_is_merging_once() -> None:
    old, new = measurements(row(STEP), row(GATHER)), measurements(row(STEP, 5e-3))
    assert merged(merged(old, new), new) == merged(old, new)


def test_a_row_is_the_median_and_the_quartiles_of_its_repeats() -> None:
    made = row_of(STEP, [1e-3, 2e-3, 3e-3, 9e-3], error=1e-3, link_bytes=7, group="long_curve")
    assert (made.median_s, made.error, made.link_bytes, made.group) == (2.5e-3, 1e-3, 7, "long_curve")
    assert made.spread == pytest.approx((7.5e-3 - 1.25e-3) / 1.349 / 2.5e-3)
    assert row_of(STEP, [2e-3], error=0, link_bytes=0, group="grid").spread == 0
