"""Sums over scheduled programs: time by part and wall, sensitivity to rates, bytes over the links, physical floor."""

import math

from msgspec import Struct
from msgspec.structs import replace

from twin.cost.roofline import WALLS, Cost, Roofs
from twin.cost.schedule import schedule
from twin.errors import MissingRate
from twin.operations.ops import Engine, Op, Program

NOT_CACHE = {"hop", "ngram"}  # parts whose link bytes are no cache traffic: they cross the link under every layout


class Part(Struct, frozen=True, kw_only=True):
    """One named share of a phase's time, along the critical path."""

    name: str
    seconds: float
    sol_s: float  # the same work at the calibrated roofs: no latency, efficiency 1
    wall: str  # what holds it: VRAM bandwidth, host link, tensor cores, ..
    rates: tuple[str, ...]  # names of the rates that it depends on


Account = tuple[str, str, tuple[str, ...]]  # what critical seconds are summed by: part, wall, rates behind them


def _all_missing(program: Program, roofs: Roofs, first: MissingRate) -> MissingRate:
    """`first`, or where the program lacks the rates of several kernels one error that names each of them."""
    kernels = dict.fromkeys(op.kernel for graph in program for op in graph.ops if op.kernel and not op.or_plain)
    missing = [key for key in kernels if not roofs.has(key)]
    if len(missing) < 2 or roofs.profile.devices:
        return first
    return MissingRate(
        f"machine {roofs.profile.name} has no rate for {', '.join(missing)}",
        hint=f"twin profiles {roofs.profile.name} lists those that it has",
    )


class Breakdown:
    """Sums over the ops of programs that run one after the other."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.by_account: dict[Account, tuple[float, float]] = {}
        """Seconds and speed-of-light seconds on the critical path."""
        self.engines: dict[Engine, tuple[float, float]] = {}
        """Busy seconds and seconds at datasheet peaks of each kind of engine, over all devices."""
        self.borrowed_s = 0.0  # of `seconds`, with kernels that were not measured on the machine
        self.products_s = 0.0  # all products at the tensor cores' datasheet peaks, whichever engine their op holds
        self.link_bytes = 0.0
        self.link_write_bytes = 0.0

    def run(self, program: Program, roofs: Roofs) -> "Breakdown":
        """Schedule `program` after what is there already; MissingRate names all the kernels that have no rate."""
        try:
            costs = [[roofs.cost(op) for op in graph.ops] for graph in program]
        except MissingRate as first:
            raise _all_missing(program, roofs, first) from None
        timeline = schedule(program, [[cost.seconds for cost in own] for own in costs])
        self.seconds += timeline.total_s
        for graph, played, own in zip(program, timeline.runs, costs, strict=True):
            for op, cost, critical in zip(graph.ops, own, played.critical, strict=True):
                self._add_work(op, cost, graph.iterations * graph.times)
                self.products_s += roofs.products_floor_s(op) * graph.iterations * graph.times
                calls = critical * graph.times
                if cost.is_borrowed:
                    self.borrowed_s += cost.seconds * calls
                if calls and cost.bound_s:
                    self._add_seconds((op.part, cost.wall, cost.bound_rates), cost.bound_s * calls, cost.sol_s * calls)
                if calls and cost.latency_s:
                    latency = (f"{op.part}.latency", "latency", cost.latency_rates)
                    self._add_seconds(latency, cost.latency_s * calls, 0.0)
        return self

    def add(self, other: "Breakdown", times: float = 1.0) -> "Breakdown":
        """The other's work `times` times over, after this one's."""
        self.seconds += other.seconds * times
        self.borrowed_s += other.borrowed_s * times
        self.products_s += other.products_s * times
        self.link_bytes += other.link_bytes * times
        self.link_write_bytes += other.link_write_bytes * times
        for account, (seconds, sol_s) in other.by_account.items():
            self._add_seconds(account, seconds * times, sol_s * times)
        for engine, (busy_s, floor_s) in other.engines.items():
            self._add_busy(engine, busy_s * times, floor_s * times)
        return self

    def parts(self) -> tuple[Part, ...]:
        """Shares of the time by part, longest first; their seconds add up to `seconds`."""
        found: dict[str, Part] = {}
        for (name, wall, rates), (seconds, sol_s) in sorted(self.by_account.items(), key=lambda item: -item[1][0]):
            same = found.get(name) or Part(name=name, seconds=0.0, sol_s=0.0, wall=WALLS[wall], rates=())
            both = tuple(dict.fromkeys((*same.rates, *rates)))
            found[name] = replace(same, seconds=same.seconds + seconds, sol_s=same.sol_s + sol_s, rates=both)
        return tuple(sorted(found.values(), key=lambda part: -part.seconds))

    def sensitivity(self) -> dict[str, float]:
        """Seconds that scale with each rate: to first order, what one per cent of it moves."""
        by_rate: dict[str, float] = {}
        for (_, _, rates), (seconds, _) in self.by_account.items():
            for rate in rates:
                by_rate[rate] = by_rate.get(rate, 0.0) + seconds
        return by_rate

    def spread_s(self, roofs: Roofs) -> float:
        """Standard deviation of `seconds`: independent rates to first order; borrowed kernels err together, too."""
        own = sum((seconds * roofs.rates[rate].spread) ** 2 for rate, seconds in self.sensitivity().items())
        return math.sqrt(own + (self.borrowed_s * roofs.whole_spread) ** 2)

    def bound(self) -> str:
        """The wall with the largest share of the time."""
        walls: dict[str, float] = {}
        for (_, wall, _), (seconds, _) in self.by_account.items():
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

    def _add_seconds(self, account: Account, seconds: float, sol_s: float) -> None:
        before, before_sol = self.by_account.get(account, (0.0, 0.0))
        self.by_account[account] = (before + seconds, before_sol + sol_s)

    def _add_work(self, op: Op, cost: Cost, calls: float) -> None:
        self._add_busy(op.engine, cost.seconds * calls, cost.floor_s * calls)
        if op.part in NOT_CACHE or op.engine is Engine.PEER:
            return
        if op.engine is Engine.D2H:
            self.link_write_bytes += op.link_bytes * op.calls * calls
        else:
            self.link_bytes += op.link_bytes * op.calls * calls

    def _add_busy(self, engine: Engine, busy_s: float, floor_s: float) -> None:
        before, before_floor = self.engines.get(engine, (0.0, 0.0))
        self.engines[engine] = (before + busy_s, before_floor + floor_s)
