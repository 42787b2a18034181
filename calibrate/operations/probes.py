"""Probes of the table: one for every operation and every value of what its points are sorted by."""

import time
from functools import partial

from calibrate.machine.description import Machine
from calibrate.operations.operation import Operation, Point
from calibrate.operations.table import OPERATIONS
from calibrate.operations.timing import compiled, fitting, measured
from calibrate.probes.probe import CannotRun, Context, Probe, Sample, cuda_only


def compile_all(context: Context) -> list[Sample]:
    """All kernels over formats compiled side by side, so that what follows is not made of waiting for compilers."""
    wanted = [
        (operation, point)
        for operation in OPERATIONS
        for point in _points(operation, context.machine, quick=context.quick)
        if not operation.supported(point, context.machine)
    ]
    begin = time.monotonic()
    failed = compiled(str(context.backend.device), wanted)
    took = time.monotonic() - begin
    return [Sample(at={"points": len(wanted)}, seconds=(took,), checked="; ".join(failed) or "all compiled")]


def _points(operation: Operation, machine: Machine, *, quick: bool) -> tuple[Point, ...]:
    return operation.calibration(cuda=machine.is_cuda, quick=quick, multiprocessors=machine.sm_count)


def _run(context: Context, *, operation: Operation, name: str) -> list[Sample]:
    """Samples of the probe's points. CannotRun where this device has no kernel for them."""
    points = [p for p in _points(operation, context.machine, quick=context.quick) if operation.probe(p) == name]
    try:
        return [each.sample for each in measured(context, fitting(context, operation, points), whole=False)]
    except RuntimeError as refused:
        if type(refused).__name__ == "NoKernel":
            raise CannotRun(str(refused)) from None
        raise


def _supported(machine: Machine, *, operation: Operation, point: Point, name: str) -> str:
    reason = operation.supported(point, machine)
    if reason or any(operation.probe(each) == name for each in _points(operation, machine, quick=False)):
        return reason
    return "nothing on a GPU uses it" if machine.is_cuda else "nothing on a processor uses it"


def table_probes() -> tuple[Probe, ...]:
    """Every one, in the order of the table; kernels of formats are compiled first."""
    found = [Probe(name="compiled_kernels", run=compile_all, supported=cuda_only, quick_s=36.0, full_s=45.0)]
    for operation in OPERATIONS:
        firsts: dict[str, Point] = {}
        for point in operation.calibrated.every():
            firsts.setdefault(operation.probe(point), point)
        for name, point in firsts.items():
            run = partial(_run, operation=operation, name=name)
            supported = partial(_supported, operation=operation, point=point, name=name)
            quick_s, full_s = operation.probe_s(point)
            found.append(Probe(name=name, run=run, supported=supported, quick_s=quick_s, full_s=full_s))
    return tuple(found)
