"""Measurements as a data file: read strictly, refused in one line, merged row by row, written back as they were."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from calibrate.measurements import (
    NAME,
    SCHEMA,
    LeftOutRow,
    MeasuredRow,
    Measurements,
    merged,
    read_measurements,
    row_of,
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


def refusal(path: Path) -> str:
    """Why the file is refused: one line with its path."""
    with pytest.raises(BadFile) as refused:
        read_measurements(path)
    assert str(path) in refused.value.message
    assert "\n" not in str(refused.value)
    return refused.value.message


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    """Also one case in the grid and on the curve."""
    rows = (row(STEP), row(GATHER, link_bytes=5), row(STEP, group="long_curve"))
    whole = measurements(*rows, left_out=(LeftOutRow(case=STEP, reason="x"),))
    path = tmp_path / NAME
    path.write_text(to_text(whole), encoding="utf-8")
    assert read_measurements(path) == whole
    assert to_text(read_measurements(path)) == path.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda plain: plain.update(extra=1), "extra"),
        (lambda plain: first(plain).update(extra=1), "extra"),
        (lambda plain: plain.pop("kv_dtype"), "kv_dtype"),
        (lambda plain: first(plain).pop("median_s"), "median_s"),
        (lambda plain: first(plain)["case"]["at"].pop("ctx_tokens"), "ctx_tokens"),
        (lambda plain: first(plain)["case"]["at"].update(ctx_token_s=1), "ctx_token_s"),
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
    assert told in refusal(changed(tmp_path / NAME, change))


@pytest.mark.parametrize("kept", [0, 1, 40, -2])
def test_a_file_that_is_cut_off_or_not_there_is_refused_in_one_line(tmp_path: Path, kept: int) -> None:
    path = tmp_path / NAME
    assert "cannot be read" in refusal(path)
    path.write_text(to_text(measurements(row(STEP)))[:kept], encoding="utf-8")
    assert refusal(path)


OLD = measurements(row(STEP, 1e-3), row(GATHER, 2e-3), row(GATHER, 2e-3, group="long_curve"))
MERGED: dict[str, tuple[Measurements | None, Measurements, list[tuple[str, str, float]]]] = {
    "a case measured again replaces its row": (
        OLD,
        measurements(row(STEP, 5e-3), made={"formats": {"code": "b"}}),
        [("grid", GATHER.id, 2e-3), ("grid", STEP.id, 5e-3), ("long_curve", GATHER.id, 2e-3)],
    ),
    "rows of a group that other code is measured for now go": (
        OLD,
        measurements(row(STEP, 5e-3), made={"grid": {"code": "b"}}),
        [("grid", STEP.id, 5e-3), ("long_curve", GATHER.id, 2e-3)],
    ),
    "a row of the curve does not replace that of the grid": (
        measurements(row(STEP, 1e-3)),
        measurements(row(STEP, 5e-3, group="long_curve")),
        [("grid", STEP.id, 1e-3), ("long_curve", STEP.id, 5e-3)],
    ),
    "of another machine": (replace(OLD, machine="other"), measurements(row(STEP)), [("grid", STEP.id, 1e-3)]),
    "no old file": (None, measurements(row(STEP)), [("grid", STEP.id, 1e-3)]),
}


@pytest.mark.parametrize("case", MERGED)
def test_merging_is_row_by_row_and_merging_twice_is_merging_once(case: str) -> None:
    old, new, kept = MERGED[case]
    both = merged(old, new)
    assert sorted((each.group, each.case.id, each.median_s) for each in both.rows) == kept
    assert both.made == ({} if old is None or old.machine != new.machine else old.made) | new.made
    assert merged(both, new) == both


def test_a_row_is_the_median_and_the_quartiles_of_its_repeats() -> None:
    made = row_of(STEP, [1e-3, 2e-3, 3e-3, 9e-3], error=1e-3, link_bytes=7, group="long_curve")
    assert (made.median_s, made.error, made.link_bytes, made.group) == (2.5e-3, 1e-3, 7, "long_curve")
    assert made.spread == pytest.approx((7.5e-3 - 1.25e-3) / 1.349 / 2.5e-3)
    assert row_of(STEP, [2e-3], error=0, link_bytes=0, group="grid").spread == 0
