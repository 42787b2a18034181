"""`python -m calibrate.rungs` learns the ladder of rates and writes `hwprofiles/ladder.json`; `--check` only compares.

Carried: the mean over machines of one kind of what a kernel reaches there. Typical: the mean over engines of what each
one's kernels of an operation reach. Spreads: every published step is predicted without any rate of its machine
(carried), or without any of its engine (typical); the spreads of groups are those under which the errors are likeliest,
machines and engines counting alike however many rows each has. Groups that no step tells of are learned from kernels:
each is held against what other machines or engines have of it.
"""

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace
from scipy.optimize import minimize
from scipy.stats import norm, t

from calibrate.published.curves import KernelRow, kernel_rows
from calibrate.published.speeds import SpeedRow, speed_rows
from hwprofiles import load_profile
from hwprofiles.ladder import (
    ANY,
    GROUP_OF,
    LADDER,
    LATENCIES,
    MANY,
    RUNGS,
    SCHEMA,
    Carried,
    Judged,
    Ladder,
    Learned,
    Rung,
    Typical,
    borrowed,
    is_plain,
    likenesses,
)
from hwprofiles.profile import LEAST_LATENCY_S, Kernel
from hwprofiles.rates import Curve, Provenance, Rate
from hwprofiles.store import shipped_kernels
from twin.cost.roofline import Roofs
from twin.errors import MissingRate
from twin.render.catalogue import rungs_text

DATE = "2026-12-01"
Z90 = float(norm.ppf(0.95))
WIDEST = 0.8  # of a spread: an interval from a quarter to four times says that nothing is known
LEAST = 0.02
TELLS = 0.1  # of a step's time that hangs on a group, from which on the step tells of it
HELD = 0.9  # of left-out steps, by their 90 % intervals
FEWEST = 3  # machines or engines that tell of a group; of fewer, kernels tell
Row = SpeedRow | KernelRow
WIDER = ("cuda", ANY)
Shelf = Mapping[str, Mapping[str, Kernel]]  # kernels by machine


# Rates


def ladder_of(
    shelf: Shelf,
    carried: Mapping[str, Learned],
    typical: Mapping[str, Learned],
    *,
    by_group: bool = False,
    whole: Learned | None = None,
) -> Ladder:
    """Borrowed rates from the kernels of a shelf, with these spreads.

    by_group: whether all carried kernels are taken to be off as their groups are, however many machines tell of them.
    whole: how far whole steps are off beside their kernels; None while it is being learned.
    """
    by_key: dict[str, dict[str, dict[str, Kernel]]] = {}
    for machine in sorted(shelf):
        gpu = load_profile(machine).gpu
        for key, kernel in shelf[machine].items():
            if key.split("/")[0] in GROUP_OF and not _is_none(kernel):
                for likeness in dict.fromkeys(likenesses(gpu)):
                    by_key.setdefault(key, {}).setdefault(likeness, {})[machine] = kernel
    return Ladder(
        schema=SCHEMA,
        carried={key: _by_likeness(found, by_group=by_group) for key, found in sorted(by_key.items())},
        typical=_typical(by_key),
        whole=whole or _UNKNOWN,
        carried_spreads=dict(carried),
        typical_spreads=dict(typical),
    )


def _by_likeness(found: Mapping[str, Mapping[str, Kernel]], *, by_group: bool) -> dict[str, Carried]:
    """Each likeness once: one whose machines are all that a wider one has says nothing more."""
    names = {likeness: tuple(sorted(own)) for likeness, own in found.items()}
    wider = {likeness: [other for other in names if other != likeness and set(names[other]) == set(own)]
             for likeness, own in names.items()}  # fmt: skip
    kept = [likeness for likeness in found if likeness == ANY or not any(o in WIDER for o in wider[likeness])]
    return {likeness: _carried(found[likeness], by_group=by_group) for likeness in kept}


def _is_none(kernel: Kernel) -> bool:
    """Whether it says that a machine's other rates hold what it takes."""
    return kernel.efficiency is None and kernel.latency is not None and kernel.latency.value <= LEAST_LATENCY_S


def _carried(own: Mapping[str, Kernel], *, by_group: bool) -> Carried:
    machines = tuple(sorted(own))
    kernel = averaged([own[name] for name in machines], f"carried from {_listed(machines)}")
    if by_group or len(machines) < FEWEST:
        return Carried(kernel=kernel, machines=machines)
    return Carried(kernel=_with_spreads(kernel, own), machines=machines, of_group=False)


def _with_spreads(kernel: Kernel, own: Mapping[str, Kernel]) -> Kernel:
    """The kernel with how far each of its rates is off on one of the machines, told by all the others."""
    away = {name: averaged([own[other] for other in own if other != name], "") for name in own}
    curve, latency = kernel.efficiency, kernel.latency
    if curve is not None:
        spreads = tuple(
            _apart(
                (away[name].efficiency, each.efficiency, place)
                for name, each in own.items()
                if each.efficiency is not None
            )
            for place in curve.at
        )
        spreads = tuple(round(min(WIDEST, each), 3) for each in spreads)
        curve = replace(curve, spreads=spreads, spread=max(spreads))
    if latency is not None:
        pairs = [(away[name].latency, each.latency) for name, each in own.items()]
        logs = [math.log(told.value / real.value) for told, real in pairs if told is not None and real is not None]
        latency = replace(latency, spread=_root(logs))
    return replace(kernel, efficiency=curve, latency=latency)


def _apart(told: Iterable[tuple[Curve | None, Curve, float]]) -> float:
    """Root mean square of logarithms of shares at a place, told over real."""
    return _root([math.log(there(place) / real(place)) for there, real, place in told if there is not None])


def _root(logs: Sequence[float]) -> float:
    """Root mean square, widened for the number of machines."""
    widened = float(t.ppf(0.95, max(1, len(logs) - 1))) / Z90
    return round(float(min(WIDEST, max(LEAST, widened * math.sqrt(sum(log * log for log in logs) / len(logs))))), 3)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 4 else f"{len(names)} machines"


def _typical(by_key: Mapping[str, Mapping[str, Mapping[str, Kernel]]]) -> dict[str, Typical]:
    """By operation and whether formats are plain: the mean over engines of each one's mean, on devices with CUDA."""
    found: dict[str, dict[bool, dict[str, list[Kernel]]]] = {}
    for key, kinds in sorted(by_key.items()):
        operation, engine, fmt = key.split("/")
        own = list(kinds.get("cuda", {}).values())
        if not own:
            continue
        found.setdefault(operation, {}).setdefault(is_plain(fmt), {}).setdefault(engine, []).append(averaged(own, ""))

    def over_engines(operation: str, engines: Mapping[str, Sequence[Kernel]]) -> Kernel | None:
        if not engines:
            return None
        note = f"typical of {operation} over {_listed(sorted(engines))}"
        return averaged([averaged(kernels, "") for _, kernels in sorted(engines.items())], note)

    return {
        name: Typical(
            plain=over_engines(name, found[name].get(True, {})),
            quantised=over_engines(name, found[name].get(False, {})),
        )
        for name in sorted(found)
    }


def averaged(kernels: Sequence[Kernel], note: str) -> Kernel:
    """The geometric mean of several kernels: each rate over those that have it."""
    efficiency = _mean_curve([each.efficiency for each in kernels if each.efficiency is not None], note)
    latency = _mean_rate([each.latency for each in kernels if each.latency is not None], note)
    combine = _mean_rate([each.combine for each in kernels if each.combine is not None], note)
    counts = next((each.operations for each in kernels if each.operations is not None), None)
    return Kernel(efficiency=efficiency, latency=latency, combine=combine, operations=counts)


def _mean_rate(rates: Sequence[Rate], note: str) -> Rate | None:
    if not rates:
        return None
    mean = math.exp(sum(math.log(rate.value) for rate in rates) / len(rates))
    return replace(rates[0], value=float(f"{mean:.4g}"), **_together(rates, note))


def _mean_curve(curves: Sequence[Curve], note: str) -> Curve | None:
    """Over the places of all: outside its own places each holds its outermost value."""
    if not curves:
        return None
    alike = [curve for curve in curves if curve.over == curves[0].over]
    at = sorted({place for curve in alike for place in curve.at})
    means = (math.exp(sum(math.log(curve(place)) for curve in alike) / len(alike)) for place in at)
    shares = tuple(min(1.0, float(f"{mean:.4g}")) for mean in means)
    return replace(alike[0], at=tuple(at), efficiency=shares, **_together(alike, note))


def _together(rates: Sequence[Provenance], note: str) -> dict[str, object]:
    """Provenance of a mean: how far its rates are off by themselves is part of the rung's spread."""
    source = "measured" if all(rate.source == "measured" for rate in rates) else "published"
    return {"spread": 0.0, "n": sum(rate.n for rate in rates), "source": source, "fitted_on": (), "note": note}


# Spreads from steps


class Missed(NamedTuple):
    """One step told without what was left out."""

    log: float  # of predicted over measured
    shares: dict[str, float]  # of its time, by group of borrowed rates
    known: float  # variance by all other rates
    deviation: float  # as the ladder has it, of a logarithm
    what: str  # operation that takes most of its time, and phase
    left_out: str
    machine: str
    engine: str


def missed_steps(
    rows: Sequence[Row],
    shelf: Shelf,
    *,
    without: Callable[[Row], str],
    drop: Callable[[Shelf, str], Shelf],
    carried: Mapping[str, Learned],
    typical: Mapping[str, Learned],
    whole: Learned | None = None,
) -> list[Missed]:
    """Every row told without what is left out for it, where the rest has borrowed rates for it."""
    found: list[Missed] = []
    for name in sorted({without(row) for row in rows}):
        ladder = ladder_of(drop(shelf, name), carried, typical, by_group=carried is NOTHING, whole=whole)
        roofs: dict[int, Roofs] = {}
        for row in (row for row in rows if without(row) == name):
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


def engine_of(row: Row) -> str:
    """Whose kernels a row tells of."""
    return row.op.kernel.split("/")[1] if isinstance(row, KernelRow) else row.engine


_UNKNOWN = Learned(spread=0.0, n=1, source="measured", date=DATE, machines=1, engines=1, coverage=0.0, half_width=0.0)
NOTHING: dict[str, Learned] = {
    group: _UNKNOWN for own in dict.fromkeys(GROUP_OF.values()) for group in (own, f"{own}{MANY}", LATENCIES)
}
"""Spreads while they are being learned."""


def likeliest(missed: Sequence[Missed]) -> dict[str, Learned]:
    """Spread of each group that enough machines or engines tell of: together the likeliest, widened for their number.

    All are scaled alike until the 90 % interval holds 90 % of the left-out groups' rows, each group counting once.
    """
    tell = {
        group: {each.left_out for each in missed if each.shares.get(group, 0.0) >= TELLS}
        for group in dict.fromkeys(name for each in missed for name in each.shares)
    }
    groups = [group for group, names in tell.items() if len(names) >= FEWEST]
    if not groups:
        return {}
    shares = np.array([[each.shares.get(group, 0.0) for group in groups] for each in missed])
    logs, known = np.array([each.log for each in missed]), np.array([each.known + 1e-4 for each in missed])
    rows_of = {name: sum(other.left_out == name for other in missed) for name in {each.left_out for each in missed}}
    weight = np.array([1 / rows_of[each.left_out] for each in missed])

    def surprise(log_spreads: np.ndarray) -> float:
        variance = known + (shares**2) @ np.exp(2 * log_spreads)
        return float(np.sum(weight * (np.log(variance) + logs**2 / variance)))

    bounds = [(math.log(LEAST), math.log(WIDEST))] * len(groups)
    found = minimize(surprise, np.full(len(groups), math.log(0.2)), bounds=bounds, method="L-BFGS-B")
    spreads = np.exp(found.x)
    scale = _holding(logs, shares, known, weight, spreads)
    learned = {}
    for at, group in enumerate(groups):
        number = len(tell[group])
        widened = float(t.ppf(0.95, number - 1)) / Z90
        own = [index for index, each in enumerate(missed) if each.shares.get(group, 0.0) >= TELLS]
        learned[group] = _learned(
            spreads[at] * scale * widened, [missed[index] for index in own],
            f"steps of {number} left out one at a time; x {widened:.2f} for their number",
            held=_held(logs[own], shares[own], known[own], weight[own], spreads * scale),
            half_width=_half_width(shares[own], known[own], spreads * scale),
        )  # fmt: skip
    return learned


def _holding(logs: np.ndarray, shares: np.ndarray, known: np.ndarray, weight: np.ndarray, spreads: np.ndarray) -> float:
    """The least factor at which the intervals hold 90 %."""
    for factor in np.geomspace(0.6, 3.0, 60):
        if _held(logs, shares, known, weight, spreads * factor) >= 0.9:
            return float(factor)
    return 3.0


def _held(logs: np.ndarray, shares: np.ndarray, known: np.ndarray, weight: np.ndarray, spreads: np.ndarray) -> float:
    deviation = np.sqrt(known + (shares**2) @ spreads**2)
    return float(np.sum(weight * (np.abs(logs) <= Z90 * deviation)) / np.sum(weight))


def _half_width(shares: np.ndarray, known: np.ndarray, spreads: np.ndarray) -> float:
    return float(np.median(np.exp(Z90 * np.sqrt(known + (shares**2) @ spreads**2)) - 1))


def _learned(spread: float, missed: Sequence[Missed], note: str, *, held: float, half_width: float) -> Learned:
    return Learned(
        spread=round(float(min(WIDEST, max(LEAST, spread))), 4), n=len(missed), source="measured", date=DATE, note=note,
        machines=len({each.machine for each in missed}), engines=len({each.engine for each in missed}),
        coverage=round(held, 3), half_width=round(half_width, 3),
    )  # fmt: skip


# Spreads from kernels, of groups that no step tells of


def missed_kernels(shelf: Shelf, *, of_engines: bool) -> dict[str, list[Missed]]:
    """By group: each kernel's share held against what other machines, or other engines, have."""
    found: dict[str, list[Missed]] = {}
    for name in sorted(_engines(shelf) if of_engines else shelf):
        ladder = ladder_of((without_engine if of_engines else without_machine)(shelf, name), NOTHING, NOTHING)
        for machine in sorted(shelf):
            bare = replace(load_profile(machine), kernels={})
            for key, real in shelf[machine].items():
                if key.split("/")[0] not in GROUP_OF or (key.split("/")[1] if of_engines else machine) != name:
                    continue
                told = borrowed(bare, key, ladder)
                if told is None or told.rung != ("typical" if of_engines else "carried"):
                    continue
                missed = [
                    Missed(log, {}, 0.0, 0.0, "", name, machine, key.split("/")[1]) for log in _logs(told.kernel, real)
                ]
                found.setdefault(told.group, []).extend(missed)
    return found


def _engines(shelf: Shelf) -> set[str]:
    return {key.split("/")[1] for kernels in shelf.values() for key in kernels}


def without_machine(shelf: Shelf, name: str) -> Shelf:
    """All kernels but those of one machine, and of what is the same device."""
    return {machine: kernels for machine, kernels in shelf.items() if machine != name}


def without_engine(shelf: Shelf, name: str) -> Shelf:
    """All kernels but those of one engine, under whatever names it has several."""

    def own(key: str) -> bool:
        implementation = key.split("/")[1]
        return implementation == name or implementation.startswith(f"{name}_")

    return {
        machine: {key: kernel for key, kernel in kernels.items() if not own(key)} for machine, kernels in shelf.items()
    }


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
        widened = float(t.ppf(0.95, max(1, number - 1))) / Z90
        spread = min(WIDEST, widened * math.sqrt(sum(sum(each) / len(each) for each in squares.values()) / number))
        held = sum(abs(each.log) <= Z90 * spread for each in own) / len(own)
        note = f"kernels of {number} left out one at a time; x {widened:.2f} for their number"
        learned[group] = _learned(spread, own, note, held=held, half_width=math.exp(Z90 * spread) - 1)
    return learned


def _spread(learned: Learned) -> float:
    return learned.spread


class Leaving(NamedTuple):
    """A way of leaving out, and the rung that the rest then stands on."""

    rung: Rung
    without: Callable[[Row], str]
    drop: Callable[[Shelf, str], Shelf]


def _machine(row: Row) -> str:
    return row.machine.device_name


BY_MACHINE, BY_ENGINE = Leaving("carried", _machine, without_machine), Leaving("typical", engine_of, without_engine)


def learned(shelf: Shelf, rows: Sequence[Row]) -> Ladder:
    """The ladder of these kernels, with spreads by these steps."""
    found: dict[str, dict[str, Learned]] = {}
    for leaving in (BY_MACHINE, BY_ENGINE):
        missed = missed_steps(rows, shelf, without=leaving.without, drop=leaving.drop, carried=NOTHING, typical=NOTHING)
        of_engines = leaving is BY_ENGINE
        found[leaving.rung] = of_kernels(missed_kernels(shelf, of_engines=of_engines)) | likeliest(missed)
    carried, typical = found["carried"], found["typical"]
    typical = {group: max(own, carried.get(group, own), key=_spread) for group, own in typical.items()}
    steps = [row for row in rows if isinstance(row, SpeedRow)]
    missed = missed_steps(steps, shelf, without=_machine, drop=without_machine, carried=carried, typical=typical)
    return ladder_of(shelf, carried, typical, whole=_whole(missed))


def _whole(missed: Sequence[Missed]) -> Learned:
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
    found: list[Judged] = []
    for leaving in (BY_MACHINE, BY_ENGINE):
        missed = missed_steps(
            rows, shelf, without=leaving.without, drop=leaving.drop, carried=ladder.carried_spreads,
            typical=ladder.typical_spreads, whole=ladder.whole,
        )  # fmt: skip
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


def _rounded(value: float) -> float:
    return round(float(value), 3)


def document(ladder: Ladder) -> bytes:
    """The ladder as it is shipped."""
    return msgspec.json.format(msgspec.json.encode(ladder), indent=1) + b"\n"


def main(arguments: Sequence[str]) -> int:
    """Write the ladder and what leaving out shows of it, or check it."""
    shelf: Shelf = shipped_kernels()
    rows: list[Row] = [*speed_rows(), *kernel_rows()]
    ladder = learned(shelf, rows)
    ladder = replace(ladder, judged=tuple(judged(ladder, shelf, rows)))
    if "--check" in arguments:
        return int(document(ladder) != LADDER.read_bytes())
    LADDER.write_bytes(document(ladder))
    sys.stdout.write(rungs_text(ladder))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
