"""`twin validate --device`: run the grid here and now, hold it against the profile's predictions, keep it if asked."""

import datetime
import platform
import subprocess
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from calibrate.format_grid import format_grid
from calibrate.grid import long_curve, validation_grid
from calibrate.kernel_cases import KV_DTYPE, KernelCase, missing_rate
from calibrate.live import compare_rows
from calibrate.measure import LeftOut, WrongResult, measure
from calibrate.measure_formats import measure_formats
from calibrate.measurements import (
    SCHEMA,
    Group,
    LeftOutRow,
    MeasuredRow,
    Measurements,
    measurements_path,
    merged,
    read_measurements,
    row_of,
    to_text,
)
from calibrate.prefill_grid import prefill_grid
from calibrate.probes.machine import check_device, code_hash, commit, cpu_name
from calibrate.records_grid import records_grid
from calibrate.rounds import measured_in_rounds
from calibrate.validation import Skipped, Validation, validation_of
from hwprofiles import HardwareProfile, load_profile
from twin.errors import Impossible
from twin.render.output import check_writable, write_atomic

if TYPE_CHECKING:
    from realkernels.device import Device

Progress = Callable[[int, int, str], None]
"""Called with (cases done, cases in all, id of the next)."""


def validate_live(
    hw: str, device: str, *, quick: bool, curve: bool, formats: bool = False, progress: Progress
) -> tuple[Validation, Measurements]:
    """Measure the grid (and the long curve), or the grid of cache formats, on `device` and compare with `hw`.

    Raises Impossible where the device is not there, is another machine than the profile's, or computes wrong results.
    """
    profile = load_profile(hw)
    backend = _backend(device)
    check_same_machine(profile, backend)
    kind = "cpu" if device == "cpu" else "cuda"
    cases = _cases(kind, quick=quick, curve=curve, formats=formats)
    lately = [*prefill_grid(quick=quick, device=kind), *records_grid(quick=quick, device=kind)] if formats else []
    unrated = {case: missing for case in lately if (missing := missing_rate(case, profile))}
    if formats:
        cases["formats"] += [case for case in lately if case not in unrated]
    rows: list[MeasuredRow] = []
    left: list[LeftOutRow] = []
    counted = _counted(progress, backend.rounds * sum(map(len, cases.values())))
    try:
        for group, own in cases.items():
            timed = measure_formats if group == "formats" else measure
            for outcome in measured_in_rounds(partial(timed, own, backend, progress=counted), backend.rounds):
                if isinstance(outcome, LeftOut):
                    left.append(LeftOutRow(case=outcome.case, reason=outcome.reason))
                else:
                    rows.append(row_of(outcome, group))
    except WrongResult as wrong:
        raise Impossible(str(wrong)) from None
    left += [LeftOutRow(case=case, reason=missing) for case, missing in unrated.items()]
    if not rows:
        raise Impossible(f"nothing could be measured: {left[0].reason}")
    made = Measurements(
        schema=SCHEMA,
        machine=profile.name,
        kv_dtype=KV_DTYPE,
        made={} if formats else provenance(device),
        made_formats=provenance(device, " --formats") if formats else {},
        rows=tuple(rows),
        left_out=tuple(left),
    )
    skipped = [_skipped(profile.name, row) for row in left]
    return validation_of(profile.name, compare_rows(made.rows, profile, kv_dtype=KV_DTYPE), skipped), made


def _skipped(machine: str, left: LeftOutRow) -> Skipped:
    return Skipped(
        id=f"{machine}.{left.case.id}",
        system=machine,
        metric=left.case.metric,
        status="not_measured",
        reason=left.reason,
    )


def _cases(kind: str, *, quick: bool, curve: bool, formats: bool) -> dict[Group, list[KernelCase]]:
    """What is measured, by the group that its rows belong to."""
    if formats:
        return {"formats": list(format_grid(quick=quick, device=kind))}
    cases: dict[Group, list[KernelCase]] = {"grid": validation_grid(quick=quick, device=kind)}
    if curve and kind == "cuda":
        cases["long_curve"] = [case for tier in ("vram", "host") for case in long_curve(tier, most_tokens=2**31)]
    return cases


def _counted(progress: Progress, total: int) -> Callable[[KernelCase], None]:
    begun = count()
    return lambda case: progress(next(begun), total, case.id)


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


def _backend(device: str) -> "Device":
    check_device(device)
    try:
        from realkernels.device import open_device  # noqa: PLC0415
    except ImportError as missing:
        what = missing.name or str(missing).splitlines()[0]
        raise Impossible(f"{what} is not installed", hint="pip install 'kv-twin[kernels]'") from None
    try:
        return open_device(device)
    except RuntimeError as refused:
        raise Impossible(str(refused).splitlines()[0]) from None


def check_same_machine(profile: HardwareProfile, backend: "Device") -> None:
    """Impossible where the profile is of another device: its errors would say nothing."""
    name = device_name(backend)
    if name != profile.gpu.name:
        raise Impossible(
            f"profile {profile.name} is of {profile.gpu.name!r}, this device is {name!r}",
            hint="twin calibrate makes a profile of this one",
        )


def device_name(backend: "Device") -> str:
    """What a profile calls the device in gpu.name."""
    if backend.device.type == "cpu":
        return cpu_name()
    import torch  # noqa: PLC0415

    return str(torch.cuda.get_device_name(backend.device))


def provenance(device: str, options: str = "") -> dict[str, str]:
    """What the figures were made by: versions, driver, clocks, commit, date, command."""
    import torch  # noqa: PLC0415

    facts = {
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "commit": commit() or "unknown",
        "code": code_hash(),
        "command": f"twin validate --device {device}{options} --record",
    }
    if device != "cpu":
        query = "name,driver_version,clocks.sm,clocks.mem,pcie.link.gen.current,pcie.link.width.current"
        facts["gpu"] = _output(["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"])
    return facts


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()  # noqa: S603
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
