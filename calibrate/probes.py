"""What a probe is: a named measurement with a reason where it cannot run, an estimate, and raw samples.

Each is named source_to_target[_duplex][_mechanism]. The probes themselves need torch; what they are made of does not.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from msgspec import Struct

from calibrate.machine.description import Machine

if TYPE_CHECKING:
    from realkernels.device import Device

Point = TypeVar("Point")

LEAST_REPEATS = 3


class Pace(NamedTuple):
    """How often a point is timed."""

    share_s: float
    """Seconds that its repeats may take."""
    most: int
    least: int = LEAST_REPEATS
    once: bool = True
    """Whether one that takes longer than a round's share is run once a round."""


QUICK, FULL = Pace(0.15, 9), Pace(0.5, 21)
WARM_UPS = 3
"""Untimed runs before quick work: clocks and caches settle."""
SLOW_SHARE = 0.25
"""Repeats of one point that would take more than this share of the estimate are cut down to two."""


class WrongData(RuntimeError):
    """What was timed computed or copied something else than it should; its time is worth nothing."""


class CannotRun(RuntimeError):
    """What a probe finds out only by trying: this machine or its software cannot do it. It is skipped, in one line."""


def quartile_spread(seconds: Sequence[float]) -> float:
    """Relative standard deviation of at least two repeats, from their quartiles: an outlier is not a wide spread."""
    low, _, high = statistics.quantiles(seconds, n=4)  # of a normal distribution they lie 1.349 deviations apart
    return (high - low) / 1.349 / statistics.median(seconds)


class Sample(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One point of a probe: where it was taken and the seconds of each repeat."""

    at: Mapping[str, int | float | str]
    seconds: tuple[float, ...]
    moved_bytes: float = 0
    """Bytes that one repeat moves."""
    flops: float = 0
    """Operations of one repeat."""
    checked: str = ""
    """How the result was verified after the timing."""
    rounds: tuple[int, ...] = ()
    """How many of the repeats each round took, one after the other; empty where all are of one moment."""

    def __post_init__(self) -> None:
        if not self.seconds or min(self.seconds) <= 0:
            raise ValueError(f"{self.at}: a sample needs seconds above 0, not {self.seconds}")

    @property
    def median_s(self) -> float:
        """Median of the repeats."""
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Of the repeats; 0 where they are too few to tell."""
        return quartile_spread(self.seconds) if len(self.seconds) >= LEAST_REPEATS else 0.0

    @property
    def n(self) -> int:
        """Repeats."""
        return len(self.seconds)

    @property
    def round_medians_s(self) -> tuple[float, ...]:
        """Median of each round."""
        ends = tuple(accumulate(self.rounds or (self.n,)))
        return tuple(statistics.median(self.seconds[first:end]) for first, end in pairwise((0, *ends)))


class ProbeRecord(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one probe gave: its samples, or why it did not run."""

    samples: tuple[Sample, ...] = ()
    skipped: str = ""
    left_out: int = 0
    """Points not measured because the probe was late."""
    took_s: float = 0.0


@dataclass(kw_only=True)
class Context:
    """What a probe may use while it runs."""

    machine: Machine
    backend: "Device"
    folder: Path
    """Where scratch files may lie."""
    quick: bool
    rounds: int = 1
    """How many rounds, this one included, share the repeats of a point."""
    estimate_s: float = 60.0
    pace: Pace | None = None
    """None: that of the mode."""
    begins: Callable[[Any], object] = lambda _point: None
    """Told of each point before it is timed."""
    left_out: int = 0
    started: float = field(default_factory=time.monotonic)

    @property
    def cuda(self) -> bool:
        """Whether the device is a GPU."""
        return self.machine.is_cuda

    def pick(self, quick: Point, full: Point) -> Point:
        """The value for this mode."""
        return quick if self.quick else full

    def points(self, points: Iterable[Point]) -> Iterator[Point]:
        """The points one by one, cheapest first, until the probe is late; the rest is counted, not measured."""
        waiting = list(points)
        for done, point in enumerate(waiting):
            if done >= 1 and time.monotonic() - self.started > self.estimate_s:
                self.left_out += len(waiting) - done
                return
            self.begins(point)
            yield point

    def seconds(
        self, work: Callable[[], object], *, before: Callable[[], object] | None = None, per: int = 1,
        clock: "Device | None" = None,
    ) -> tuple[float, ...]:  # fmt: skip
        """Seconds of each repeat, divided by `per`: as many repeats as fit a point's share of time, at least three.

        Where there are several rounds, all of them together; one that takes longer than a round's share is run once.
        `before` prepares each repeat, untimed; `clock` times in place of the device.
        """
        timed = partial((clock or self.backend).seconds, work, before=before)
        timed(repeats=1, warm_up=0)  # compiles and touches, which is not timed
        begin = time.monotonic()
        first = timed(repeats=1, warm_up=0)
        once = time.monotonic() - begin
        pace = self.pace or self.pick(QUICK, FULL)
        share, most, least = pace.share_s / self.rounds, -(-pace.most // self.rounds), -(-pace.least // self.rounds)
        if pace.once and self.rounds > 1 and once > share:
            return (first[0] / per,)
        repeats = max(least, min(most, int(share / max(once, 1e-6))))
        if repeats * once > SLOW_SHARE * self.estimate_s:
            repeats = 1  # a machine this slow gets a second sample and no more
        warm_up = WARM_UPS if once * WARM_UPS < share else 0
        samples = [*first, *timed(repeats=repeats, warm_up=warm_up)]
        return tuple(sample / per for sample in (samples if repeats == 1 else samples[1:]))

    def fitting(self, sizes: Iterable[int], *, free_bytes: float, share: float) -> list[int]:
        """Those of `sizes` whose bytes stay within a share of the free memory."""
        return [size for size in sizes if size <= free_bytes * share]


def cuda_only(machine: Machine) -> str:
    """The reason for probes of what only a GPU has."""
    return "" if machine.is_cuda else "needs a CUDA device: the CPU reads its memory without link, launch or pinning"


@dataclass(frozen=True, kw_only=True)
class Probe:
    """A measurement by name; `run` gives raw samples whose results were checked."""

    name: str
    run: Callable[[Context], list[Sample]]
    supported: Callable[[Machine], str] = lambda _machine: ""
    """Empty, or the reason why it cannot run here."""
    quick_s: float = 2.0
    full_s: float = 6.0

    def estimate_s(self, *, quick: bool) -> float:
        """Seconds that it should take."""
        return self.quick_s if quick else self.full_s


def check(name: str, right: Any, how: str) -> str:
    """`how` if the check passed; WrongData otherwise."""
    if not bool(right):
        raise WrongData(f"{name}: the result is wrong after timing ({how})")
    return how


MODULES = ("device", "link", "host")
"""Of the machine itself, in the order of measuring: what is cheap and what later sizes depend on comes first."""


def all_probes() -> tuple[Probe, ...]:
    """Every probe in the order in which they run: the machine's, then those of the table of operations. Needs torch."""
    from calibrate.operations.timing import table_probes  # noqa: PLC0415 - the table's fits know samples

    machine = (probe for name in MODULES for probe in import_module(f"calibrate.machine.{name}").PROBES)
    return (*machine, *table_probes())
