"""Sums over simulated programs: time by part and wall, what it hangs on, bytes over the links, the physical floor."""

import math
from typing import TypeVar

from msgspec import Struct

from twin.ops import Engine, Op, Program
from twin.roofline import WALLS, Cost, Roofs
from twin.simulate import simulate

_Key = TypeVar("_Key")


NOT_CACHE = {"hop", "ngram"}
"""Parts whose link bytes are no cache traffic: they cross the link under every layout."""


class Part(Struct, kw_only=True):
    """One named share of a phase's time, along the critical path."""

    name: str
    seconds: float = 0.0
    sol_s: float = 0.0
    """The same work at the calibrated roofs: no latency, efficiency 1."""
    wall: str = ""
    """What holds it: VRAM bandwidth, host link, tensor cores, ..."""
    rates: tuple[str, ...] = ()
    """Names of the rates that it hangs on."""


class Tally:
    """Sums over the ops of programs that run one after the other."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.parts: dict[str, Part] = {}
        self.walls: dict[str, float] = {}
        self.hangs_on: dict[str, float] = {}
        """Seconds that scale with each rate: to first order, what one per cent of it moves."""
        self.floors: dict[tuple[int, Engine], float] = {}
        self.naive_s = 0.0
        self.busy: dict[Engine, float] = {}
        self.link_bytes = 0.0
        self.link_write_bytes = 0.0

    def run(self, program: Program, roofs: Roofs) -> "Tally":
        """Simulate `program` after what is there already."""
        costs = [[roofs.cost(op) for op in block.ops] for block in program]
        timeline = simulate(program, [[cost.seconds for cost in own] for own in costs])
        self.seconds += timeline.total_s
        for block, played, own in zip(program, timeline.runs, costs, strict=True):
            calls = block.iterations * block.times
            for op, cost, critical in zip(block.ops, own, played.critical, strict=True):
                self._occupy(op, cost, calls)
                if critical:
                    self._charge(op, cost, critical * block.times)
        return self

    def add(self, other: "Tally", times: float = 1.0) -> "Tally":
        """The other's work `times` times over, after this one's."""
        self.seconds += other.seconds * times
        self.naive_s += other.naive_s * times
        self.link_bytes += other.link_bytes * times
        self.link_write_bytes += other.link_write_bytes * times
        for part in other.parts.values():
            self._charge_part(part.name, part.seconds * times, part.sol_s * times, part.wall, part.rates)
        _accumulate(self.walls, other.walls, times)
        _accumulate(self.hangs_on, other.hangs_on, times)
        _accumulate(self.floors, other.floors, times)
        _accumulate(self.busy, other.busy, times)
        return self

    def floor_s(self) -> float:
        """Busiest engine at datasheet peaks: whatever overlaps, no run can be shorter."""
        return max(self.floors.values(), default=0.0)

    def spread_s(self, roofs: Roofs) -> float:
        """Standard deviation of `seconds`: independent rates, each to first order."""
        return math.sqrt(sum((seconds * roofs.rates[rate].spread) ** 2 for rate, seconds in self.hangs_on.items()))

    def bound(self) -> str:
        """The wall with the largest share of the time."""
        return WALLS[max(self.walls, key=lambda wall: self.walls[wall])] if self.walls else "nothing"

    def _charge(self, op: Op, cost: Cost, calls: float) -> None:
        if cost.bound_s:
            self._charge_wall(cost.wall, cost.bound_s * calls, cost.bound_rates)
            self._charge_part(op.part, cost.bound_s * calls, cost.sol_s * calls, WALLS[cost.wall], cost.bound_rates)
        if cost.latency_s:
            seconds = cost.latency_s * calls
            self._charge_wall("latency", seconds, cost.latency_rates)
            self._charge_part(f"{op.part}.latency", seconds, 0.0, WALLS["latency"], cost.latency_rates)

    def _charge_wall(self, wall: str, seconds: float, rates: tuple[str, ...]) -> None:
        self.walls[wall] = self.walls.get(wall, 0.0) + seconds
        for rate in rates:
            self.hangs_on[rate] = self.hangs_on.get(rate, 0.0) + seconds

    def _charge_part(self, name: str, seconds: float, sol_s: float, wall: str, rates: tuple[str, ...]) -> None:
        part = self.parts.get(name)
        if part is None:
            part = self.parts[name] = Part(name=name, wall=wall, rates=rates)
        part.seconds += seconds
        part.sol_s += sol_s

    def _occupy(self, op: Op, cost: Cost, calls: float) -> None:
        place = (op.device, op.engine)
        self.floors[place] = self.floors.get(place, 0.0) + cost.floor_s * calls
        self.naive_s += cost.floor_s * calls
        self.busy[op.engine] = self.busy.get(op.engine, 0.0) + cost.seconds * calls
        if op.part in NOT_CACHE:
            return
        if op.engine is Engine.D2H:
            self.link_write_bytes += op.link_bytes * op.calls * calls
        else:
            self.link_bytes += op.link_bytes * op.calls * calls


def _accumulate(into: dict[_Key, float], other: dict[_Key, float], times: float) -> None:
    for key, value in other.items():
        into[key] = into.get(key, 0.0) + value * times
