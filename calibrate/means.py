"""What kernels reach over several machines, and over several engines: the rates that the ladder lends.

Carried: the mean over machines of one kind. Typical: the mean over engines of what each one's kernels of an operation
reach. Means are of logarithms, so that a share and its inverse, a second's work and the seconds of a work, are alike.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from msgspec import UNSET
from msgspec.structs import replace
from scipy.stats import norm, t

from hwprofiles import load_profile
from hwprofiles.ladder import ANY, GROUP_OF, SCHEMA, Carried, Ladder, Learned, Typical, is_plain, likenesses
from hwprofiles.profile import LEAST_LATENCY_S, Kernel
from hwprofiles.rates import Curve, Provenance, Rate

Z90 = float(norm.ppf(0.95))
WIDEST = 0.8  # of a spread: an interval from a quarter to four times says that nothing is known
LEAST = 0.02
FEWEST = 3  # machines that tell by themselves how far a kernel is off
WIDER = ("cuda", ANY)  # likenesses that hold others

Shelf = Mapping[str, Mapping[str, Kernel]]  # kernels by machine


class Spreads(NamedTuple):
    """How far borrowed rates are off: by group on both rungs, and of a carried kernel by what machines tell of it."""

    carried: Mapping[str, Learned]
    typical: Mapping[str, Learned]
    whole: Learned
    """How far whole steps are off beside their kernels."""
    by_group: bool = False
    """Whether all carried kernels are taken to be off as their groups are, however many machines tell of them."""


def ladder_of(shelf: Shelf, spreads: Spreads) -> Ladder:
    """Borrowed rates from the kernels of a shelf, with these spreads."""
    by_key: dict[str, dict[str, dict[str, Kernel]]] = {}
    for machine in sorted(shelf):
        gpu = load_profile(machine).gpu
        for key, kernel in shelf[machine].items():
            if key.split("/")[0] in GROUP_OF and not _is_none(kernel):
                for likeness in likenesses(gpu):
                    by_key.setdefault(key, {}).setdefault(likeness, {})[machine] = kernel
    return Ladder(
        schema=SCHEMA,
        carried={key: _by_likeness(found, spreads) for key, found in sorted(by_key.items())},
        typical=_typical(by_key),
        whole=spreads.whole,
        carried_spreads=dict(spreads.carried),
        typical_spreads=dict(spreads.typical),
    )


def widened(number: int) -> float:
    """Factor on a root mean square of so many values, so that 90 % of a next one are held as often as it says."""
    return float(t.ppf(0.95, max(1, number - 1))) / Z90


def _is_none(kernel: Kernel) -> bool:
    """Whether it says that a machine's other rates hold what it takes."""
    return kernel.efficiency is None and kernel.latency is not None and kernel.latency.value <= LEAST_LATENCY_S


def _by_likeness(found: Mapping[str, Mapping[str, Kernel]], spreads: Spreads) -> dict[str, Carried]:
    """Each likeness, but those whose machines are all that a wider one has."""

    def says_more(likeness: str) -> bool:
        wider = (found.get(other, {}) for other in WIDER if other != likeness)
        return likeness == ANY or all(own.keys() != found[likeness].keys() for own in wider)

    return {likeness: _carried(own, spreads) for likeness, own in found.items() if says_more(likeness)}


def _carried(own: Mapping[str, Kernel], spreads: Spreads) -> Carried:
    machines = tuple(sorted(own))
    kernel = averaged([own[name] for name in machines], f"carried from {_listed(machines)}")
    if spreads.by_group or len(machines) < FEWEST:
        return Carried(kernel=kernel, machines=machines)
    return Carried(kernel=_with_spreads(kernel, own), machines=machines, of_group=False)


def _with_spreads(kernel: Kernel, own: Mapping[str, Kernel]) -> Kernel:
    """The kernel with how far each of its rates is off on one of the machines, told by all the others.

    Of a share that is how far share and roof are off together: each machine's share is of its own roof as it is known.
    """
    pairs = [(averaged([own[other] for other in own if other != name], ""), own[name]) for name in own]
    curve, latency = kernel.efficiency, kernel.latency
    if curve is not None:
        curves = [(told.efficiency, real.efficiency) for told, real in pairs]
        spreads = tuple(_apart([(a(at), b(at)) for a, b in curves if a and b]) for at in curve.at)
        curve = replace(curve, spreads=spreads, spread=max(spreads))
    if latency is not None:
        latencies = [(told.latency, real.latency) for told, real in pairs]
        latency = replace(latency, spread=_apart([(a.value, b.value) for a, b in latencies if a and b]))
    return replace(kernel, efficiency=curve, latency=latency)


def _apart(told: Sequence[tuple[float, float]]) -> float:
    """Spread of values, each as it was told and as it is; the widest where there is none."""
    if not told:
        return WIDEST
    return _root([math.log(value / real) for value, real in told])


def _root(logs: Sequence[float]) -> float:
    """Root mean square, widened for the number of machines."""
    spread = widened(len(logs)) * math.sqrt(sum(log * log for log in logs) / len(logs))
    return round(float(min(WIDEST, max(LEAST, spread))), 3)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 4 else f"{len(names)} machines"


def _typical(by_key: Mapping[str, Mapping[str, Mapping[str, Kernel]]]) -> dict[str, Typical]:
    """By operation and whether formats are plain: the mean over engines of each one's mean, on devices with CUDA."""
    found: dict[str, dict[bool, dict[str, list[Kernel]]]] = {}
    for key, kinds in sorted(by_key.items()):
        operation, engine, fmt = key.split("/")
        if own := list(kinds.get("cuda", {}).values()):
            engines = found.setdefault(operation, {}).setdefault(is_plain(fmt), {})
            engines.setdefault(engine, []).append(averaged(own, ""))
    return {
        operation: Typical(
            plain=_over_engines(operation, own.get(True, {})), quantised=_over_engines(operation, own.get(False, {}))
        )
        for operation, own in found.items()
    }


def _over_engines(operation: str, engines: Mapping[str, Sequence[Kernel]]) -> Kernel | None:
    if not engines:
        return None
    note = f"typical of {operation} over {_listed(sorted(engines))}"
    return averaged([averaged(kernels, "") for _, kernels in sorted(engines.items())], note)


def averaged(kernels: Sequence[Kernel], note: str) -> Kernel:
    """The geometric mean of several kernels: each rate over those that have it, counts as the first has them."""
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
    """Over the places of all: outside its own places each holds its outermost value. One axis alone: the first's."""
    if not curves:
        return None
    alike = [curve for curve in curves if curve.over == curves[0].over]
    at = sorted({place for curve in alike for place in curve.at})
    means = (math.exp(sum(math.log(curve(place)) for curve in alike) / len(alike)) for place in at)
    shares = tuple(min(1.0, float(f"{mean:.4g}")) for mean in means)
    return replace(alike[0], at=tuple(at), efficiency=shares, spreads=UNSET, **_together(alike, note))


def _together(rates: Sequence[Provenance], note: str) -> dict[str, object]:
    """Provenance of a mean: how far its rates are off by themselves is part of the rung's spread."""
    source = "measured" if all(rate.source == "measured" for rate in rates) else "published"
    return {"spread": 0.0, "n": sum(rate.n for rate in rates), "source": source, "fitted_on": (), "note": note}
