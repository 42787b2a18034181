"""`python -m calibrate.rungs` learns the ladder of rates from all shipped kernels and writes `hwprofiles/ladder.json`.

Typical: the geometric mean over engines of what each one's kernels of an operation reach. Spreads: each kernel is told
without the machine that it was measured on (carried), or without its engine (typical), and held against what it is;
machines and engines count alike, however many kernels each has. `--check` writes nothing, and exits 1 where the file is
not what the kernels say today.
"""

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import msgspec
from scipy.stats import norm, t

from hwprofiles.ladder import GROUP_OF, LADDER, SCHEMA, Ladder, Learned, Typical, averaged, is_plain
from hwprofiles.profile import Kernel
from hwprofiles.store import shipped_kernels

DATE = "2026-12-01"
Z90 = float(norm.ppf(0.95))
WIDEST = 1.0  # a spread is a share: a factor of e either way says that nothing is known


class Entry(NamedTuple):
    """One shipped kernel."""

    machine: str
    key: str
    kernel: Kernel

    @property
    def operation(self) -> str:
        """First word of its key."""
        return self.key.split("/")[0]

    @property
    def engine(self) -> str:
        """Whose kernel it is."""
        return self.key.split("/")[1]

    @property
    def plain(self) -> bool:
        """Whether its format is stored plain."""
        return is_plain(self.key.split("/")[2])


class Missed(NamedTuple):
    """Logarithm of what was told of one left-out kernel over what it is."""

    log: float
    machine: str
    engine: str


def entries() -> list[Entry]:
    """All shipped kernels of operations that have a rung."""
    shelf = shipped_kernels()
    return [
        Entry(machine, key, kernel)
        for machine in sorted(shelf)
        for key, kernel in sorted(shelf[machine].items())
        if key.split("/")[0] in GROUP_OF
    ]


def typical_of(own: Sequence[Entry], note: str) -> Kernel | None:
    """The mean over engines of each one's mean; None of nothing."""
    by_engine: dict[str, list[Kernel]] = {}
    for entry in own:
        by_engine.setdefault(entry.engine, []).append(entry.kernel)
    return averaged([averaged(kernels, note) for _, kernels in sorted(by_engine.items())], note) if own else None


def learned_ladder(known: Sequence[Entry]) -> Ladder:
    """Typical kernels and the spread of each group on both rungs."""
    typical: dict[str, Typical] = {}
    for operation in sorted({entry.operation for entry in known}):
        kinds = {
            name: typical_of(
                [e for e in known if e.operation == operation and e.plain == plain], f"over {name} formats"
            )
            for name, plain in (("plain", True), ("quantised", False))
        }
        typical[operation] = Typical(**kinds)
    return Ladder(
        schema=SCHEMA,
        typical=typical,
        carried_spreads=_spreads(known, _carried, lambda missed: missed.machine),
        typical_spreads=_spreads(known, _of_others, lambda missed: missed.engine),
    )


def _carried(entry: Entry, known: Sequence[Entry]) -> Kernel | None:
    """What other machines say of the kernel."""
    others = [e.kernel for e in known if e.key == entry.key and e.machine != entry.machine]
    return averaged(others, "") if others else None


def _of_others(entry: Entry, known: Sequence[Entry]) -> Kernel | None:
    """What other engines' kernels of the operation say."""
    alike = [e for e in known if e.operation == entry.operation and e.engine != entry.engine]
    return typical_of([e for e in alike if e.plain == entry.plain] or alike, "")


def _spreads(
    known: Sequence[Entry],
    told_of: Callable[[Entry, Sequence[Entry]], Kernel | None],
    left_out: Callable[[Missed], str],
) -> dict[str, Learned]:
    """By group, and for the whole ladder where a group has nothing to be left out."""
    groups: dict[str, list[Missed]] = {}
    for entry in known:
        told = told_of(entry, known)
        if told is not None:
            missed = [Missed(log, entry.machine, entry.engine) for log in _logs(told, entry.kernel)]
            groups.setdefault(GROUP_OF[entry.operation], []).extend(missed)
    every = [missed for group in groups.values() for missed in group]
    return {group: _learned(groups.get(group) or every, left_out) for group in dict.fromkeys(GROUP_OF.values())}


def _logs(told: Kernel, real: Kernel) -> Iterator[float]:
    """Of a kernel's share at its own places, and of its latency where that is all it has."""
    if told.efficiency is not None and real.efficiency is not None and told.efficiency.over == real.efficiency.over:
        for place, share in zip(real.efficiency.at, real.efficiency.efficiency, strict=True):
            yield math.log(told.efficiency(place) / share) / math.sqrt(len(real.efficiency.at))
    elif told.latency is not None and real.latency is not None and real.efficiency is None:
        yield math.log(told.latency.value / real.latency.value)


def _learned(missed: Sequence[Missed], left_out: Callable[[Missed], str]) -> Learned:
    """Root mean square over what was left out, each machine or engine once, widened for their number.

    Of few groups little is known: the spread is multiplied by Student's 95 % quantile with one degree of freedom fewer
    than there are groups, over the normal one's.
    """
    by_group: dict[str, list[float]] = {}
    for each in missed:
        by_group.setdefault(left_out(each), []).append(each.log)
    squares = [sum(log * log for log in logs) / len(logs) for logs in by_group.values()]
    groups = len(squares)
    widened = float(t.ppf(0.95, max(1, groups - 1))) / Z90
    spread = min(WIDEST, widened * math.sqrt(sum(squares) / groups))
    held = sum(abs(each.log) <= Z90 * spread for each in missed) / len(missed)
    return Learned(
        spread=round(spread, 4), n=len(missed), source="measured", date=DATE,
        note=f"{groups} left out one at a time; x {widened:.2f} for their number",
        machines=len({each.machine for each in missed}), engines=len({each.engine for each in missed}),
        coverage=round(held, 3),
    )  # fmt: skip


def document() -> bytes:
    """The ladder as it is shipped."""
    return msgspec.json.format(msgspec.json.encode(learned_ladder(entries())), indent=1) + b"\n"


def main(arguments: Sequence[str]) -> int:
    """Write the ladder, or check it."""
    made = document()
    if "--check" in arguments:
        return int(made != LADDER.read_bytes())
    LADDER.write_bytes(made)
    ladder = msgspec.json.decode(made, type=Ladder)
    for rung, spreads in (("carried", ladder.carried_spreads), ("typical", ladder.typical_spreads)):
        for group, told in spreads.items():
            counts = f"{told.n} values, {told.machines} machines, {told.engines} engines"
            sys.stdout.write(f"{rung:8s} {group:18s} {100 * told.spread:5.1f} %  {told.coverage:4.0%} held  {counts}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
