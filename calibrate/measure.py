"""Runs cases on a device: those over one cache together, and what it has no room or no kernel for left out."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from math import inf
from pathlib import Path
from tempfile import gettempdir
from typing import TYPE_CHECKING

from msgspec.structs import replace

from calibrate.machine.description import Machine, first_line
from calibrate.measurements import LeftOutRow, MeasuredRow, row_of
from calibrate.operations.operation import Group, Value
from calibrate.operations.table import Case
from calibrate.operations.timing import Pair, compiled, measured, release, settle, shared_by
from calibrate.probes import CannotRun, Context, Pace, WrongData

if TYPE_CHECKING:
    from realkernels.device import Device

PACE = Pace(0.25, 30, 5, once=False)
UNSTEADY = 1.25
"""A case whose slowest round took this many times as long as its quickest cannot be judged."""
Outcome = MeasuredRow | LeftOutRow


def measure(
    cases: Iterable[Case], backend: "Device", machine: Machine, *, group: Group,
    progress: Callable[[Case], object] = lambda _case: None,
) -> Iterator[Outcome]:  # fmt: skip
    """Measure the cases of one group, once. WrongData where a kernel computes something else than it should."""
    every = list(cases)
    settle(case.row for case in every)
    if machine.is_cuda:  # what cannot be compiled says so when it is run
        compiled(str(backend.device), ((case.row, case.at) for case in every))
    sharing: dict[tuple[Value, ...], list[Case]] = {}  # by what is opened for them
    for case in every:
        sharing.setdefault(shared_by((case.row, case.at)), []).append(case)
    for together in sharing.values():
        waiting = list(together)
        context = Context(
            machine=machine, backend=backend, folder=Path(gettempdir()), quick=False, rounds=backend.rounds,
            estimate_s=inf, pace=PACE, begins=partial(_told, progress, waiting),
        )  # fmt: skip
        try:
            for made in measured(context, [(case.row, case.at) for case in together], whole=True):
                case = waiting.pop(0)
                yield row_of(case, made.sample.seconds, error=made.error, link_bytes=made.link_bytes, group=group)
        except (MemoryError, CannotRun, RuntimeError) as refused:
            if isinstance(refused, WrongData):
                raise
            yield from (LeftOutRow(case=case, reason=first_line(refused)) for case in waiting)
        release()


def _told(progress: Callable[[Case], object], waiting: Sequence[Case], _pair: Pair) -> None:
    progress(waiting[0])


def measured_in_rounds(run: Callable[[], Iterable[Outcome]], rounds: int) -> list[Outcome]:
    """Every case with the repeats of all rounds; left out where it was in one, or where rounds do not agree."""
    found: dict[str, list[MeasuredRow]] = {}
    left: dict[str, LeftOutRow] = {}
    for _ in range(rounds):
        for outcome in run():
            if isinstance(outcome, LeftOutRow):
                left[outcome.case.id] = outcome
            else:
                found.setdefault(outcome.case.id, []).append(outcome)
    return [*(_judged(each) for id_, each in found.items() if id_ not in left), *left.values()]


def _judged(rounds: Sequence[MeasuredRow]) -> Outcome:
    slowest, quickest = (pick(each.median_s for each in rounds) for pick in (max, min))
    if slowest > UNSTEADY * quickest:
        times = f"{slowest / quickest:.2f} times as long in one of {len(rounds)} rounds as in another"
        return LeftOutRow(case=rounds[0].case, reason=f"the machine was too busy to tell: the case took {times}")
    samples = [sample for each in rounds for sample in each.samples_s]
    first = rounds[0]
    joined = row_of(first.case, samples, error=0.0, link_bytes=first.link_bytes, group=first.group)
    return replace(joined, error=max(each.error for each in rounds))
