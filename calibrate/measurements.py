"""What was measured on a machine with this project's own kernels: a data file beside its profile, read strictly."""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from calibrate.kernel_cases import KernelCase
from calibrate.measure import Measurement
from hwprofiles.errors import BadFile
from hwprofiles.files import read_json
from hwprofiles.store import RECORDS, profile_names

SCHEMA = "twin.measurements/1"
NAME = "measurements.json"
Seconds = Annotated[float, Meta(ge=1e-9, le=1e6)]
Share = Annotated[float, Meta(ge=0, le=1e6)]
Group = Literal["grid", "long_curve", "formats"]


class MeasuredRow(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One timed case. All seconds are of the whole case."""

    case: KernelCase
    median_s: Seconds
    spread: Share
    samples_s: tuple[Seconds, ...]
    error: Share
    link_bytes: Annotated[int, Meta(ge=0, le=2**50)]
    group: Group = "grid"


class LeftOutRow(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A case that the machine could not run."""

    case: KernelCase
    reason: str


class Measurements(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All rows of one machine, with what they were made by."""

    schema: str
    machine: str
    kv_dtype: str
    made: dict[str, str]
    """Driver, versions, clocks, commit, date and the command: of the grid and the long curve."""
    made_formats: dict[str, str] = {}
    """The same of the formats' cases, which are measured on their own."""
    rows: tuple[MeasuredRow, ...]
    left_out: tuple[LeftOutRow, ...] = ()

    def __post_init__(self) -> None:
        if self.schema != SCHEMA:
            raise ValueError(f"schema must be {SCHEMA!r}, not {self.schema!r}")
        ids = [(row.group, row.case.id) for row in self.rows]
        repeated = sorted({id_ for id_ in ids if ids.count(id_) > 1})
        if repeated:
            raise ValueError(f"case {repeated[0][1]} appears twice in {repeated[0][0]}")


def measured_machines() -> list[str]:
    """Shipped machines with measurements of their own."""
    return sorted(path.parent.name for path in RECORDS.glob(f"*/{NAME}"))


def read_measurements(path: Path) -> Measurements:
    """The measurements in `path`; BadFile names the key that is wrong."""
    try:
        return msgspec.convert(read_json(path), Measurements)
    except (msgspec.ValidationError, ValueError) as wrong:
        raise wrong if isinstance(wrong, BadFile) else BadFile(f"{path}: {wrong}") from None


def shipped_measurements(machine: str) -> Measurements:
    """The measurements shipped with `machine`."""
    return read_measurements(RECORDS / machine / NAME)


def measurements_path(machine: str) -> Path:
    """Where the measurements of a machine lie, be it shipped or the path of a profile: beside its profile."""
    return RECORDS / machine / NAME if machine in profile_names() else Path(machine).with_suffix(f".{NAME}")


def row_of(measurement: Measurement, group: Group = "grid") -> MeasuredRow:
    """A fresh measurement as a row."""
    return MeasuredRow(
        case=measurement.case,
        median_s=measurement.median_s,
        spread=measurement.spread,
        samples_s=measurement.samples_s,
        error=measurement.error,
        link_bytes=measurement.link_bytes,
        group=group,
    )


def merged(old: Measurements | None, new: Measurements) -> Measurements:
    """`new` over `old`: a case measured again replaces its row, the others stay.

    Rows of another machine, cache format or other kernels' code are not mixed with new ones: they go. Cases of formats
    and all others are two kinds, each with its own code: what measures one kind leaves the other as it is.
    """
    if old is None or (old.machine, old.kv_dtype) != (new.machine, new.kv_dtype):
        return new
    fresh = {(row.group, row.case.id) for row in new.rows}
    tried = {row.case.id for row in new.rows} | {row.case.id for row in new.left_out}
    replaced = {of_formats for of_formats in (False, True) if _outdated(old, new, of_formats=of_formats)}
    kept = tuple(
        row for row in old.rows if (row.group, row.case.id) not in fresh and bool(row.case.format) not in replaced
    )
    left_out = tuple(row for row in old.left_out if row.case.id not in tried and bool(row.case.format) not in replaced)
    return msgspec.structs.replace(
        new,
        made=new.made or old.made,
        made_formats=new.made_formats or old.made_formats,
        rows=(*kept, *new.rows),
        left_out=(*left_out, *new.left_out),
    )


def _outdated(old: Measurements, new: Measurements, *, of_formats: bool) -> bool:
    """Whether `new` measured this kind of case with other code than `old`."""
    before, now = (old.made_formats, new.made_formats) if of_formats else (old.made, new.made)
    return bool(now) and bool(before) and before.get("code", "") != now.get("code", "")


def to_text(measurements: Measurements) -> str:
    """As a data file."""
    plain: dict[str, Any] = msgspec.to_builtins(measurements)
    return json.dumps(plain, indent=1) + "\n"
