"""A rate is a number with a unit, a spread, a source and a date; curves (shares) and counts go over one quantity."""

import math
from bisect import bisect_right
from datetime import date
from itertools import pairwise
from typing import Annotated, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

Source = Literal["measured", "published", "datasheet", "fitted"]
Unit = Literal["B/s", "FLOP/s", "op/s", "s", "B", "1"]
Positive = Annotated[float, Meta(gt=0, le=1e18)]  # each use has a narrower range of its own
Efficiency = Annotated[float, Meta(ge=1e-6, le=1)]
"""The least that is shipped is 0.0017: what is below a thousandth of that is a slip, and seconds would lose meaning."""
Place = Annotated[float, Meta(ge=1e-3, le=2.0**50)]  # tokens, rows, bytes or programs that a curve goes over
CLOSEST = 1e-9  # two places of a curve are further apart than that, relative: a slope between closer ones is rounding
Spread = Annotated[float, Meta(ge=0, le=1)]
IsoDate = Annotated[str, Meta(pattern=r"\A\d{4}-\d{2}-\d{2}\Z")]


class Provenance(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where a number comes from: carried into every prediction that uses it."""

    spread: Spread  # relative standard deviation, as a share of the value
    n: Annotated[int, Meta(ge=1, le=10**12)]  # samples behind the value
    source: Source
    date: IsoDate
    note: str = ""
    fitted_on: tuple[str, ...] = ()  # ids of the recorded measurements that set the value: never evidence for it

    def __post_init__(self) -> None:
        if (self.source == "fitted") != bool(self.fitted_on):
            raise ValueError("source is 'fitted' exactly when fitted_on names the rows")
        date.fromisoformat(self.date)


class Rate(Provenance, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One number: bytes or operations a second, seconds, bytes, or a plain ratio."""

    value: Positive
    unit: Unit

    @property
    def deviation(self) -> float:
        """Standard deviation, in the rate's unit."""
        return self.value * self.spread


class Line(Provenance, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Numbers over one quantity, read between places that rise."""

    over: str
    at: tuple[Place, ...]

    def check(self, name: str, values: tuple[float, ...]) -> None:
        """Raise ValueError unless there is a value called `name` for each place, and places rise."""
        if not self.at or len(self.at) != len(values):
            raise ValueError(f"'at' and {name!r} need the same length, at least 1")
        if any(b <= a * (1 + CLOSEST) for a, b in pairwise(self.at)):
            raise ValueError("'at' must rise strictly, by more than rounding")


class Curve(Line, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Share of a roof over one quantity, linear in its logarithm; outside the outermost points they hold."""

    efficiency: tuple[Efficiency, ...]
    spreads: tuple[Spread | None, ...] | UnsetType = UNSET
    """At each place, of share and roof together where they were measured as one; None: of the share alone, `spread`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("efficiency", self.efficiency)
        if self.spreads and len(self.spreads) != len(self.at):
            raise ValueError("'at' and 'spreads' need the same length, if there are any spreads")

    def spread_with_roof(self, x: float) -> float | None:
        """How well share and roof together are known at `x`: as the less certain place next to it; None: apart."""
        if not self.spreads:
            return None
        right = bisect_right(self.at, x)
        exact = right > 0 and self.at[right - 1] == x
        known = [each for each in self.spreads[max(0, right - 1) : right if exact else right + 1] if each is not None]
        return max(known) if len(known) == (1 if exact or right in (0, len(self.at)) else 2) else None

    def __call__(self, x: float) -> float:
        """Efficiency at `x`, in (0, 1]."""
        right = bisect_right(self.at, x)
        if right == 0 or len(self.at) == 1:
            return self.efficiency[0]
        if right == len(self.at):
            return self.efficiency[-1]
        low, high = self.at[right - 1], self.at[right]
        weight = math.log(x / low) / math.log(high / low)
        return self.efficiency[right - 1] * (1 - weight) + self.efficiency[right] * weight

    def around(self, x: float) -> tuple[float, float]:
        """The calibrated points next to `x`, itself where it is one; twice the nearest one outside of all."""
        right = bisect_right(self.at, x)
        low = self.at[max(0, right - 1)]
        return (low, low) if low == x or right == 0 else (low, self.at[min(right, len(self.at) - 1)])

    def covers(self, x: float) -> bool:
        """Whether `x` lies inside what was calibrated; a single point is a constant and claims no range."""
        return len(self.at) == 1 or self.at[0] <= x <= self.at[-1]


class Counts(Line, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A count over one quantity: linear between points; beyond the outermost their line goes on, but never falls."""

    counts: tuple[Positive, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("counts", self.counts)

    def __call__(self, x: float) -> float:
        """The count at `x`; below the first point it is that of the first."""
        if x <= self.at[0] or len(self.at) == 1:
            return self.counts[0]
        right = min(bisect_right(self.at, x), len(self.at) - 1)
        low, high = self.at[right - 1], self.at[right]
        slope = (self.counts[right] - self.counts[right - 1]) / (high - low)
        if x > high:
            return self.counts[right] + max(0.0, slope) * (x - high)
        return self.counts[right - 1] + slope * (x - low)

    def covers(self, x: float) -> bool:
        """Whether `x` lies inside what was calibrated."""
        return self.at[0] <= x <= self.at[-1]
