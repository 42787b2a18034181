"""What was measured on a machine with this project's own kernels: a data file beside its profile, read strictly."""

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from calibrate.operations.operation import Group
from calibrate.operations.table import Case
from calibrate.probes import quartile_spread
from hwprofiles import load_profile
from hwprofiles.files import read_as
from hwprofiles.store import RECORDS, profile_names
from twin.cli.outputs import check_writable, write_atomic

SCHEMA = "twin.measurements/2"
NAME = "measurements.json"
Seconds = Annotated[float, Meta(ge=1e-9, le=1e6)]
Share = Annotated[float, Meta(ge=0, le=1e6)]


class MeasuredRow(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One timed case. All seconds are of the whole case."""

    case: Case
    median_s: Seconds
    spread: Share
    """Relative standard deviation of the repeats, from their quartiles."""
    samples_s: tuple[Seconds, ...]
    error: Share
    """Worst relative error of the checked outputs against float64."""
    link_bytes: Annotated[int, Meta(ge=0, le=2**50)]
    group: Group = "grid"


class LeftOutRow(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A case that the machine could not run."""

    case: Case
    reason: str


class Measurements(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All rows of one machine, with what they were made by."""

    schema: str
    machine: str
    kv_dtype: str
    """Of planes for sparse attention, where a case names no format."""
    made: dict[Group, dict[str, str]]
    """Driver, versions, clocks, commit, date and the command, by group."""
    rows: tuple[MeasuredRow, ...]
    left_out: tuple[LeftOutRow, ...] = ()

    def __post_init__(self) -> None:
        if self.schema != SCHEMA:
            raise ValueError(f"schema must be {SCHEMA!r}, not {self.schema!r}")
        ids = [(row.group, row.case.id) for row in self.rows]
        repeated = sorted({id_ for id_ in ids if ids.count(id_) > 1})
        if repeated:
            raise ValueError(f"case {repeated[0][1]} appears twice in {repeated[0][0]}")


def row_of(case: Case, samples_s: Sequence[float], *, error: float, link_bytes: int, group: Group) -> MeasuredRow:
    """A row of repeats."""
    return MeasuredRow(
        case=case, median_s=statistics.median(samples_s), samples_s=tuple(samples_s),
        spread=quartile_spread(samples_s) if len(samples_s) > 1 else 0.0,
        error=error, link_bytes=link_bytes, group=group,
    )  # fmt: skip


def measured_machines() -> list[str]:
    """Shipped machines with measurements of their own."""
    return sorted(path.parent.name for path in RECORDS.glob(f"*/{NAME}"))


def read_measurements(path: Path) -> Measurements:
    """The measurements in `path`; BadFile names the key that is wrong."""
    return read_as(path, Measurements)


def shipped_measurements(machine: str) -> Measurements:
    """The measurements shipped with `machine`."""
    return read_measurements(RECORDS / machine / NAME)


def measurements_path(machine: str) -> Path:
    """Where the measurements of a machine lie, be it shipped or the path of a profile: beside its profile."""
    return RECORDS / machine / NAME if machine in profile_names() else Path(machine).with_suffix(f".{NAME}")


def merged(old: Measurements | None, new: Measurements) -> Measurements:
    """`new` over `old`: a case measured again replaces its row, the others stay.

    Rows of another machine, of another cache type, or of a group that other kernels' code was measured for now, are
    not mixed with new ones: they go.
    """
    if old is None or (old.machine, old.kv_dtype) != (new.machine, new.kv_dtype):
        return new
    replaced = {
        group for group, made in new.made.items()
        if group in old.made and old.made[group].get("code", "") != made.get("code", "")
    }  # fmt: skip
    fresh = {(row.group, row.case.id) for row in new.rows}
    tried = {row.case.id for row in new.rows} | {row.case.id for row in new.left_out}
    kept = tuple(row for row in old.rows if (row.group, row.case.id) not in fresh and row.group not in replaced)
    left_out = tuple(row for row in old.left_out if row.case.id not in tried)
    return msgspec.structs.replace(
        new, made=old.made | new.made, rows=(*kept, *new.rows), left_out=(*left_out, *new.left_out)
    )


def check_record(hw: str) -> None:
    """Raise BadFile or CannotWrite before anything is measured, where `record` could not add to the measurements."""
    load_profile(hw)
    path = measurements_path(hw)
    check_writable(path)
    if path.exists():
        read_measurements(path)


def record(measurements: Measurements, hw: str) -> Path:
    """Add the rows to the measurements beside the profile `hw`; a case measured again replaces its row."""
    path = measurements_path(hw)
    old = read_measurements(path) if path.exists() else None
    write_atomic(path, to_text(merged(old, measurements)))
    return path


def to_text(measurements: Measurements) -> str:
    """As a data file."""
    return json.dumps(msgspec.to_builtins(measurements), indent=1) + "\n"
