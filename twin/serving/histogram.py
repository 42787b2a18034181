"""A histogram of positive numbers in constant memory: quantiles within 0.5 %, count, mean and extremes exact.

Buckets grow by 1 % each, and a quantile is the middle of its bucket: off by (1.01 - 1) / (1.01 + 1) = 0.4975 % at most.
From 1e-15 to 1e12 there are 6,250 buckets, and only those with something in them are kept.
"""

import math

GROWTH = 1.01
RELATIVE_ERROR = (GROWTH - 1) / (GROWTH + 1)
NOTHING = 1e-15
"""What is smaller counts as 0."""

_PER_LOG = 1 / math.log(GROWTH)
_SHIFT = 3500.377
"""Makes every index positive, and no round number the edge of a bucket."""

NAMED_QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


def _bucket(value: float) -> int:
    return int(math.log(value) * _PER_LOG + _SHIFT) if value > NOTHING else 0


def _middle(bucket: int) -> float:
    return math.exp((bucket - _SHIFT) / _PER_LOG) * 2 * GROWTH / (1 + GROWTH) if bucket else 0.0


class Histogram:
    """Numbers with whole weights."""

    __slots__ = ("_buckets", "count", "least", "most", "total")

    def __init__(self) -> None:
        self._buckets: dict[int, int] = {}
        self.count = 0
        self.total = 0.0
        self.least = math.inf
        self.most = 0.0

    def add(self, value: float, weight: int = 1) -> None:
        """Count `value` so many times."""
        bucket = int(math.log(value) * _PER_LOG + _SHIFT) if value > NOTHING else 0
        self._buckets[bucket] = self._buckets.get(bucket, 0) + weight
        self.count += weight
        self.total += value * weight
        self.least = min(self.least, value)
        self.most = max(self.most, value)

    def add_progression(self, first: float, growth: float, count: int, weight: int = 1) -> None:
        """Count `first`, `first + growth`, ... so many numbers in all, `weight` times each: once for each bucket."""
        last = first + growth * (count - 1)
        low, high = (first, last) if growth >= 0 else (last, first)
        rise = abs(growth)
        buckets = self._buckets
        bucket, end = _bucket(low), _bucket(high)
        done = 0
        while bucket < end and done < count:
            reached = _counted_to(bucket, low, rise, done, count)
            buckets[bucket] = buckets.get(bucket, 0) + (reached - done) * weight
            done = reached
            bucket = _bucket(low + rise * done)
        if done < count:
            buckets[end] = buckets.get(end, 0) + (count - done) * weight
        self.count += count * weight
        self.total += (first + last) / 2 * count * weight
        self.least = min(self.least, low)
        self.most = max(self.most, high)

    @property
    def mean(self) -> float:
        """Exact mean; NaN of nothing."""
        return self.total / self.count if self.count else math.nan

    def quantile(self, share: float) -> float:
        """The smallest number that at least this share of all does not exceed, within 0.5 %; NaN of nothing."""
        if not self.count:
            return math.nan
        rank = max(1, math.ceil(share * self.count - 1e-9))
        seen = 0
        for bucket in sorted(self._buckets):
            seen += self._buckets[bucket]
            if seen >= rank:
                return min(max(_middle(bucket), self.least), self.most)
        return self.most

    def summary(self) -> dict[str, float | None]:
        """p50, p90, p99, mean, min and max; None of nothing."""
        if not self.count:
            return dict.fromkeys((*NAMED_QUANTILES, "mean", "min", "max"))
        quantiles = {name: self.quantile(share) for name, share in NAMED_QUANTILES.items()}
        return {**quantiles, "mean": self.mean, "min": self.least, "max": self.most}

    def buckets(self) -> dict[float, int]:
        """Middle of every bucket that holds something, and how much, in order."""
        return {_middle(bucket): self._buckets[bucket] for bucket in sorted(self._buckets)}


def _counted_to(bucket: int, low: float, rise: float, done: int, count: int) -> int:
    """How many numbers of the progression from `low` on lie below the end of `bucket`; `done` lie below its start."""
    end = math.exp((bucket + 1 - _SHIFT) / _PER_LOG) if bucket else NOTHING
    reached = min(max(int((end - low) / rise) + 1, done + 1), count)
    while reached > done + 1 and _bucket(low + rise * (reached - 1)) > bucket:
        reached -= 1
    while reached < count and _bucket(low + rise * reached) <= bucket:
        reached += 1
    return reached
