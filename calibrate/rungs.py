"""`python -m calibrate.rungs` learns the ladder of rates and writes `hwprofiles/ladder.json`; `--check` only compares.

Rates are means (`calibrate/means.py`). Spreads: every published step is predicted without any rate of its machine
(carried), or without any of its engine (typical); the spreads of groups are those under which the errors are likeliest,
machines and engines counting alike however many rows each has. Groups that no step tells of are learned from kernels:
each is held against what other machines or engines have of it.
"""

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray
from scipy.optimize import minimize

from calibrate.means import FEWEST, LEAST, WIDEST, Z90, Shelf, Spreads, ladder_of, widened
from calibrate.published.curves import KernelRow, kernel_rows
from calibrate.published.speeds import SpeedRow, speed_rows
from hwprofiles import load_profile
from hwprofiles.ladder import GROUP_OF, LADDER, LATENCIES, MANY, RUNGS, Judged, Ladder, Learned, Rung, borrowed
from hwprofiles.profile import Kernel
from hwprofiles.store import shipped_kernels
from twin.cost.roofline import Roofs
from twin.errors import MissingRate
from twin.render.catalogue import rungs_text

DATE = "2026-12-01"
TELLS = 0.1  # of a step's time that hangs on a group, from which on the step tells of it
FIGURE = 1e-4  # variance of a published figure by itself: two runs differ by 1 %
HELD = 0.9  # of left-out steps, by their 90 % intervals
Row = SpeedRow | KernelRow
Values = NDArray[Any]


_UNKNOWN = Learned(spread=0.0, n=1, source="measured", date=DATE, machines=1, engines=1, coverage=0.0, half_width=0.0)
NOTHING: dict[str, Learned] = {
    group: _UNKNOWN for own in dict.fromkeys(GROUP_OF.values()) for group in (own, f"{own}{MANY}", LATENCIES)
}
LEARNING = Spreads(NOTHING, NOTHING, _UNKNOWN, by_group=True)
"""Spreads while they are being learned."""


# What is left out


class Leaving(NamedTuple):
    """A way of leaving out, and the rung that the rest then stands on."""

    rung: Rung
    of_row: Callable[[Row], str]
    of_kernel: Callable[[str, str], str]  # machine, key
    drop: Callable[[Shelf, str], Shelf]


def without_machine(shelf: Shelf, name: str) -> Shelf:
    """All kernels but those of one machine."""
    return {machine: kernels for machine, kernels in shelf.items() if machine != name}


def without_engine(shelf: Shelf, name: str) -> Shelf:
    """All kernels but those of one engine, under whatever names it has several."""

    def own(key: str) -> bool:
        implementation = key.split("/")[1]
        return implementation == name or implementation.startswith(f"{name}_")

    return {
        machine: {key: kernel for key, kernel in kernels.items() if not own(key)} for machine, kernels in shelf.items()
    }


def engine_of(row: Row) -> str:
    """Whose kernels a row tells of."""
    return row.op.kernel.split("/")[1] if isinstance(row, KernelRow) else row.engine


BY_MACHINE = Leaving("carried", lambda row: row.machine.device_name, lambda machine, _: machine, without_machine)
BY_ENGINE = Leaving("typical", engine_of, lambda _, key: key.split("/")[1], without_engine)


# Spreads from steps


class Missed(NamedTuple):
    """One step, or one kernel's share, told without what was left out."""

    log: float  # of predicted over measured
    shares: dict[str, float]  # of its time, by group of borrowed rates
    known: float  # variance by all other rates
    deviation: float  # as the ladder has it, of a logarithm
    what: str  # operation that takes most of its time, and phase
    left_out: str
    machine: str
    engine: str


def missed_steps(rows: Sequence[Row], shelf: Shelf, leaving: Leaving, spreads: Spreads) -> list[Missed]:
    """Every row told without what is left out for it, where the rest has borrowed rates for it."""
    found: list[Missed] = []
    for name in sorted({leaving.of_row(row) for row in rows}):
        ladder = ladder_of(leaving.drop(shelf, name), spreads)
        roofs: dict[int, Roofs] = {}
        for row in (row for row in rows if leaving.of_row(row) == name):
            if id(row.machine) not in roofs:
                roofs[id(row.machine)] = Roofs(replace(row.machine, kernels={}), strict=False, ladder=ladder)
            try:
                found.append(_missed(row, roofs[id(row.machine)], name))
            except MissingRate:
                continue
    return found


def _missed(row: Row, roofs: Roofs, left_out: str) -> Missed:
    breakdown = row.breakdown(roofs)
    seconds, shares, known = breakdown.seconds, dict[str, float](), 0.0
    for rate, hanging in breakdown.sensitivity().items():
        rung, _, group = rate.partition(" ")
        if rung in RUNGS:
            shares[group] = shares.get(group, 0.0) + hanging / seconds
        else:
            known += (hanging / seconds * roofs.rates[rate].spread) ** 2
    own = breakdown.spread_s(roofs) / seconds
    alone = roofs.whole_spread if isinstance(row, KernelRow) else 0.0  # a call is no whole step
    deviation = math.sqrt(own**2 - alone**2)
    log = math.log(seconds / row.seconds)
    return Missed(log, shares, known, deviation, _what(row), left_out, row.machine.device_name, engine_of(row))


def _what(row: Row) -> str:
    """Of a kernel its operation and phase, of a whole step its phase."""
    phase = "prefill" if row.phase.startswith("prefill") else "decode"
    return f"{row.op.kernel.split('/')[0]}, {phase}" if isinstance(row, KernelRow) else f"whole steps, {phase}"


def likeliest(missed: Sequence[Missed]) -> dict[str, Learned]:
    """Spread of each group that enough machines or engines tell of: together the likeliest, widened for their number.

    All are scaled alike until 90 % intervals hold 90 % of the rows, each machine or engine left out counting once.
    """
    tell = {
        group: {each.left_out for each in missed if each.shares.get(group, 0.0) >= TELLS}
        for group in dict.fromkeys(name for each in missed for name in each.shares)
    }
    groups = [group for group, names in tell.items() if len(names) >= FEWEST]
    if not groups:
        return {}
    shares = np.array([[each.shares.get(group, 0.0) for group in groups] for each in missed])
    logs, known = np.array([each.log for each in missed]), np.array([each.known + FIGURE for each in missed])
    rows_of = Counter(each.left_out for each in missed)
    weight = np.array([1 / rows_of[each.left_out] for each in missed])

    def surprise(log_spreads: Values) -> float:
        variance = known + (shares**2) @ np.exp(2 * log_spreads)
        return float(np.sum(weight * (np.log(variance) + logs**2 / variance)))

    bounds = [(math.log(LEAST), math.log(WIDEST))] * len(groups)
    found = minimize(surprise, np.full(len(groups), math.log(0.2)), bounds=bounds, method="L-BFGS-B")
    spreads = np.exp(found.x)
    scale = _holding(logs, shares, known, weight, spreads)
    learned = {}
    for at, group in enumerate(groups):
        number = len(tell[group])
        factor = widened(number)
        own = [index for index, each in enumerate(missed) if each.shares.get(group, 0.0) >= TELLS]
        learned[group] = _learned(
            spreads[at] * scale * factor, [missed[index] for index in own],
            f"steps of {number} left out one at a time; x {factor:.2f} for their number",
            held=_held(logs[own], shares[own], known[own], weight[own], spreads * scale),
            half_width=_half_width(shares[own], known[own], spreads * scale),
        )  # fmt: skip
    return learned


def _holding(logs: Values, shares: Values, known: Values, weight: Values, spreads: Values) -> float:
    """The least factor at which the intervals hold 90 %."""
    for factor in np.geomspace(0.6, 3.0, 60):
        if _held(logs, shares, known, weight, spreads * factor) >= HELD:
            return float(factor)
    return 3.0


def _held(logs: Values, shares: Values, known: Values, weight: Values, spreads: Values) -> float:
    deviation = np.sqrt(known + (shares**2) @ spreads**2)
    return float(np.sum(weight * (np.abs(logs) <= Z90 * deviation)) / np.sum(weight))


def _half_width(shares: Values, known: Values, spreads: Values) -> float:
    return float(np.median(np.exp(Z90 * np.sqrt(known + (shares**2) @ spreads**2)) - 1))


def _learned(spread: float, missed: Sequence[Missed], note: str, *, held: float, half_width: float) -> Learned:
    return Learned(
        spread=round(float(min(WIDEST, max(LEAST, spread))), 4), n=len(missed), source="measured", date=DATE, note=note,
        machines=len({each.machine for each in missed}), engines=len({each.engine for each in missed}),
        coverage=round(held, 3), half_width=round(half_width, 3),
    )  # fmt: skip


# Spreads from kernels, of groups that no step tells of


def missed_kernels(shelf: Shelf, leaving: Leaving) -> dict[str, list[Missed]]:
    """By group: each kernel's share held against what other machines, or other engines, have."""
    found: dict[str, list[Missed]] = {}
    for name in sorted({leaving.of_kernel(machine, key) for machine, kernels in shelf.items() for key in kernels}):
        ladder = ladder_of(leaving.drop(shelf, name), LEARNING)
        for machine in sorted(shelf):
            bare = replace(load_profile(machine), kernels={})
            for key, real in shelf[machine].items():
                told = borrowed(bare, key, ladder) if leaving.of_kernel(machine, key) == name else None
                if told is not None and told.rung == leaving.rung:
                    found.setdefault(told.group, []).extend(
                        Missed(log, {}, 0.0, 0.0, "", name, machine, key.split("/")[1])
                        for log in _logs(told.kernel, real)
                    )
    return found


def _logs(told: Kernel, real: Kernel) -> Iterator[float]:
    """Of a kernel's share at its own places, and of its latency where that is all it has."""
    if told.efficiency is not None and real.efficiency is not None and told.efficiency.over == real.efficiency.over:
        for place, share in zip(real.efficiency.at, real.efficiency.efficiency, strict=True):
            yield math.log(told.efficiency(place) / share)
    elif told.latency is not None and real.latency is not None and real.efficiency is None:
        yield math.log(told.latency.value / real.latency.value)


def of_kernels(missed: Mapping[str, Sequence[Missed]]) -> dict[str, Learned]:
    """Root mean square by group, machines or engines counting alike; of all groups where one has nothing left out."""
    every = [each for own in missed.values() for each in own]
    learned: dict[str, Learned] = {}
    for group in dict.fromkeys(GROUP_OF.values()):
        own = missed.get(group) or every
        squares: dict[str, list[float]] = {}
        for each in own:
            squares.setdefault(each.left_out, []).append(each.log**2)
        number = len(squares)
        factor = widened(number)
        spread = min(WIDEST, factor * math.sqrt(sum(sum(each) / len(each) for each in squares.values()) / number))
        held = sum(abs(each.log) <= Z90 * spread for each in own) / len(own)
        note = f"kernels of {number} left out one at a time; x {factor:.2f} for their number"
        learned[group] = _learned(spread, own, note, held=held, half_width=math.exp(Z90 * spread) - 1)
    return learned


# The ladder


def learned(shelf: Shelf, rows: Sequence[Row]) -> Ladder:
    """The ladder of these kernels, with spreads by these steps."""
    carried, typical = (
        of_kernels(missed_kernels(shelf, leaving)) | likeliest(missed_steps(rows, shelf, leaving, LEARNING))
        for leaving in (BY_MACHINE, BY_ENGINE)
    )
    wider = {group: max(own, carried.get(group, own), key=_spread) for group, own in typical.items()}
    spreads = Spreads(carried, wider, _UNKNOWN)
    steps = [row for row in rows if isinstance(row, SpeedRow)]
    return ladder_of(shelf, spreads._replace(whole=whole(missed_steps(steps, shelf, BY_MACHINE, spreads))))


def _spread(learned: Learned) -> float:
    return learned.spread


def whole(missed: Sequence[Missed]) -> Learned:
    """The least spread with which 90 % intervals hold 90 % of whole steps, each machine counting once."""
    rows = Counter(each.left_out for each in missed)

    def held(spread: float) -> float:
        wide = [abs(each.log) <= Z90 * math.hypot(each.deviation, spread) for each in missed]
        return sum(own / rows[each.left_out] for own, each in zip(wide, missed, strict=True)) / len(rows)

    spread = next((step / 100 for step in range(100) if held(step / 100) >= HELD), 1.0)
    half_width = float(np.median([math.expm1(Z90 * math.hypot(each.deviation, spread)) for each in missed]))
    note = f"steps of {len(rows)} machines left out one at a time"
    return _learned(spread, missed, note, held=held(spread), half_width=half_width)


def judged(ladder: Ladder, shelf: Shelf, rows: Sequence[Row]) -> list[Judged]:
    """Every row told without its machine, and without its engine, with the spreads that the ladder has."""
    spreads = Spreads(ladder.carried_spreads, ladder.typical_spreads, ladder.whole)
    found: list[Judged] = []
    for leaving in (BY_MACHINE, BY_ENGINE):
        missed = missed_steps(rows, shelf, leaving, spreads)
        for what in sorted({each.what for each in missed}):
            own = [each for each in missed if each.what == what]
            found.append(
                Judged(
                    rung=leaving.rung, of=what, rows=len(own),
                    machines=len({each.machine for each in own}), engines=len({each.engine for each in own}),
                    median_error=_rounded(np.median([abs(math.expm1(each.log)) for each in own])),
                    coverage=_rounded(np.mean([abs(each.log) <= Z90 * each.deviation for each in own])),
                    half_width=_rounded(np.median([math.expm1(Z90 * each.deviation) for each in own])),
                )
            )  # fmt: skip
    return found


def _rounded(value: float | np.floating[Any]) -> float:
    return round(float(value), 3)


def document(ladder: Ladder) -> bytes:
    """The ladder as it is shipped."""
    return msgspec.json.format(msgspec.json.encode(ladder), indent=1) + b"\n"


def main(arguments: Sequence[str]) -> int:
    """Write the ladder and say what leaving out shows of it, or check it: 1 where it is another."""
    shelf = shipped_kernels()
    rows: list[Row] = [*speed_rows(), *kernel_rows()]
    ladder = learned(shelf, rows)
    ladder = replace(ladder, judged=tuple(judged(ladder, shelf, rows)))
    if "--check" in arguments:
        same = document(ladder) == LADDER.read_bytes()
        sys.stdout.write("" if same else f"{LADDER.name} is another than these kernels and rows give\n")
        return int(not same)
    LADDER.write_bytes(document(ladder))
    sys.stdout.write(rungs_text(ladder))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
