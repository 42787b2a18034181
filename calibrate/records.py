"""Everything that was ever recorded, against today's predictions: published figures and own measurements."""

from calibrate.live import validate_measured
from calibrate.measurements import measured_machines, measurements_path, read_measurements, shipped_measurements
from calibrate.published.cases import recorded_machines
from calibrate.published.recorded import validate_recorded
from calibrate.validation import Validation, joined
from hwprofiles import load_profile
from hwprofiles.errors import find
from hwprofiles.files import is_path
from hwprofiles.spelling import match
from twin.errors import BadFile


def validate_records(machine: str | None = None) -> Validation:
    """All recorded cases of `machine`, or of every machine that has any.

    A machine is shipped, or the path of a profile beside which `twin validate --record` has put what it measured.
    UnknownName for one that has no records.
    """
    known = sorted({*recorded_machines(), *measured_machines()})
    if machine is None:
        return joined(part for name in known for part in _of(name))
    if match(machine, known) is None and is_path(machine):
        return _beside(machine)
    return joined(_of(find("recorded machine", machine, known)))


def _beside(profile: str) -> Validation:
    """What was recorded beside a profile of one's own."""
    machine, path = load_profile(profile), measurements_path(profile)
    if not path.exists():
        raise BadFile(
            f"nothing is recorded of {profile}: there is no {path}",
            hint=f"twin validate --hw {profile} --device cuda --record measures and records; --device cpu likewise",
        )
    measurements = read_measurements(path)
    try:
        return validate_measured(measurements, machine)
    except ValueError as wrong:  # a row that fits the schema, of a case that cannot be
        raise BadFile(f"{path}: {wrong}") from None


def _of(machine: str) -> list[Validation]:
    parts = [validate_recorded(machine)] if machine in recorded_machines() else []
    if machine in measured_machines():
        parts.append(validate_measured(shipped_measurements(machine), load_profile(machine)))
    return parts
