"""Everything that was ever recorded, against today's predictions: published figures and own measurements."""

from calibrate.cases import recorded_machines
from calibrate.live import validate_measured
from calibrate.measurements import measured_machines, shipped_measurements
from calibrate.recorded import validate_recorded
from calibrate.validation import Validation, joined
from hwprofiles import load_profile
from twin.errors import UnknownName


def validate_records(machine: str | None = None) -> Validation:
    """All recorded cases of `machine`, or of every machine that has any. UnknownName for one that has none."""
    known = sorted({*recorded_machines(), *measured_machines()})
    if machine is not None and machine not in known:
        raise UnknownName("recorded machine", machine, known)
    return joined(part for name in ([machine] if machine else known) for part in _of(name))


def _of(machine: str) -> list[Validation]:
    parts = []
    if machine in recorded_machines():
        parts.append(validate_recorded(machine))
    if machine in measured_machines():
        parts.append(validate_measured(shipped_measurements(machine), load_profile(machine)))
    return parts
