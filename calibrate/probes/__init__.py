"""One measurement per rate, named source_to_target[_duplex][_mechanism]; each says whether it can run here.

The probes themselves need torch and are loaded by `all_probes` only; what they are made of does not.
"""

from importlib import import_module

from calibrate.machine.description import Machine
from calibrate.probes.probe import CannotRun, Context, Probe, ProbeRecord, Sample, WrongData

__all__ = ["CannotRun", "Context", "Machine", "Probe", "ProbeRecord", "Sample", "WrongData", "all_probes"]

_MODULES = ("copies", "mapped", "launches", "host")
"""Of the machine itself, in the order of measuring: what is cheap and what later sizes depend on comes first."""


def all_probes() -> tuple[Probe, ...]:
    """Every probe in the order in which they run: the machine's, then those of the table of operations. Needs torch."""
    from calibrate.operations.probes import table_probes  # noqa: PLC0415 - the table's fits know samples

    machine = (probe for name in _MODULES for probe in import_module(f"calibrate.machine.{name}").PROBES)
    return (*machine, *table_probes())
