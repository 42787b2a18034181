"""Sums over simulated programs: time by part and wall, what it hangs on, bytes over the links, the physical floor."""

import math

from msgspec import Struct

from twin.cost.roofline import WALLS, Cost, Roofs
from twin.cost.schedule import simulate
from twin.errors import MissingRate
from twin.operations.ops import Engine, Op, Program

NOT_CACHE = {"hop", "ngram"}
"""Parts whose link bytes are no cache traffic: they cross the link under every layout."""


class Part(Struct, frozen=True, kw_only=True):
    """One named share of a phase's time, along the critical path."""

    name: str
    seconds: float
    sol_s: float
    """The same work at the calibrated roofs: no latency, efficiency 1."""
    wall: str
    """What holds it: VRAM bandwidth, host link, tensor cores, ..."""
    rates: tuple[str, ...]
    """Names of the rates that it hangs on."""


Account = tuple[str, str, tuple[str, ...]]
"""Under what seconds on the critical path are booked: part, wall, rates that they hang on."""


def _all_missing(program: Program, roofs: Roofs, first: MissingRate) -> MissingRate:
    """`first`, or where the program lacks the rates of several kernels one error that names each of them."""
    kernels = dict.fromkeys(op.kernel for block in program for op in block.ops if op.kernel)
    missing = [key for key in kernels if key not in roofs.profile.kernels]
    if len(missing) < 2:
        return first
    return MissingRate(
        f"machine {roofs.profile.name} has no rate for {', '.join(missing)}",
        hint=f"twin profiles {roofs.profile.name} lists those that it has",
    )


class Tally:
    """Sums over the ops of programs that run one after the other."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.booked: dict[Account, tuple[float, float]] = {}
        """Seconds and speed-of-light seconds on the critical path."""
        self.engines: dict[Engine, tuple[float, float]] = {}
        """Busy seconds and seconds at datasheet peaks of each kind of engine, over all devices."""
        self.products_s = 0.0
        """All products at the tensor cores' datasheet peaks, whichever engine their op holds."""
        self.link_bytes = 0.0
        self.link_write_bytes = 0.0

    def run(self, program: Program, roofs: Roofs) -> "Tally":
        """Simulate `program` after what is there already; MissingRate names all the kernels that have no rate."""
        try:
            costs = [[roofs.cost(op) for op in block.ops] for block in program]
        except MissingRate as first:
            raise _all_missing(program, roofs, first) from None
        timeline = simulate(program, [[cost.seconds for cost in own] for own in costs])
        self.seconds += timeline.total_s
        for block, played, own in zip(program, timeline.runs, costs, strict=True):
            for op, cost, critical in zip(block.ops, own, played.critical, strict=True):
                self._occupy(op, cost, block.iterations * block.times)
                self.products_s += roofs.products_floor_s(op) * block.iterations * block.times
                if critical:
                    self._charge(op, cost, critical * block.times)
        return self

    def add(self, other: "Tally", times: float = 1.0) -> "Tally":
        """The other's work `times` times over, after this one's."""
        self.seconds += other.seconds * times
        self.products_s += other.products_s * times
        self.link_bytes += other.link_bytes * times
        self.link_write_bytes += other.link_write_bytes * times
        for account, (seconds, sol_s) in other.booked.items():
            self._book(account, seconds * times, sol_s * times)
        for engine, (busy_s, floor_s) in other.engines.items():
            self._hold(engine, busy_s * times, floor_s * times)
        return self

    def parts(self) -> tuple[Part, ...]:
        """Shares of the time by part, longest first; their seconds add up to `seconds`."""
        merged: dict[str, Part] = {}
        for (name, wall, rates), booked in sorted(self.booked.items(), key=lambda item: -item[1][0]):
            seconds, sol_s = booked
            if name in merged:
                same = merged[name]
                seconds, sol_s = seconds + same.seconds, sol_s + same.sol_s
                held_by, hangs_on = same.wall, tuple(dict.fromkeys((*same.rates, *rates)))
            else:
                held_by, hangs_on = WALLS[wall], rates
            merged[name] = Part(name=name, seconds=seconds, sol_s=sol_s, wall=held_by, rates=hangs_on)
        return tuple(sorted(merged.values(), key=lambda part: -part.seconds))

    def hangs_on(self) -> dict[str, float]:
        """Seconds that scale with each rate: to first order, what one per cent of it moves."""
        by_rate: dict[str, float] = {}
        for (_, _, rates), (seconds, _) in self.booked.items():
            for rate in rates:
                by_rate[rate] = by_rate.get(rate, 0.0) + seconds
        return by_rate

    def spread_s(self, roofs: Roofs) -> float:
        """Standard deviation of `seconds`: independent rates, each to first order."""
        return math.sqrt(sum((seconds * roofs.rates[rate].spread) ** 2 for rate, seconds in self.hangs_on().items()))

    def bound(self) -> str:
        """The wall with the largest share of the time."""
        walls: dict[str, float] = {}
        for (_, wall, _), (seconds, _) in self.booked.items():
            walls[wall] = walls.get(wall, 0.0) + seconds
        return WALLS[max(walls, key=lambda wall: walls[wall])] if walls else "nothing"

    def floor_s(self) -> float:
        """Busiest kind of engine, or all products, at datasheet peaks: layers follow each other: no run is shorter."""
        return max((self.products_s, *(floor_s for _, floor_s in self.engines.values())))

    def naive_s(self) -> float:
        """The usual estimate: all bytes and operations over datasheet rates, one after the other, nothing else."""
        return sum(floor_s for _, floor_s in self.engines.values())

    def busy_s(self) -> dict[Engine, float]:
        """Busy seconds of each kind of engine, over all devices."""
        return {engine: busy_s for engine, (busy_s, _) in self.engines.items()}

    def _charge(self, op: Op, cost: Cost, calls: float) -> None:
        if cost.bound_s:
            self._book((op.part, cost.wall, cost.bound_rates), cost.bound_s * calls, cost.sol_s * calls)
        if cost.latency_s:
            self._book((f"{op.part}.latency", "latency", cost.latency_rates), cost.latency_s * calls, 0.0)

    def _book(self, account: Account, seconds: float, sol_s: float) -> None:
        before, before_sol = self.booked.get(account, (0.0, 0.0))
        self.booked[account] = (before + seconds, before_sol + sol_s)

    def _occupy(self, op: Op, cost: Cost, calls: float) -> None:
        self._hold(op.engine, cost.seconds * calls, cost.floor_s * calls)
        if not op.link_bytes or op.part in NOT_CACHE:
            return
        if op.engine is Engine.D2H:
            self.link_write_bytes += op.link_bytes * op.calls * calls
        else:
            self.link_bytes += op.link_bytes * op.calls * calls

    def _hold(self, engine: Engine, busy_s: float, floor_s: float) -> None:
        before, before_floor = self.engines.get(engine, (0.0, 0.0))
        self.engines[engine] = (before + busy_s, before_floor + floor_s)
