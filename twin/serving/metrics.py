"""What a simulation counts, in memory that does not grow with its length: times, who ran when, the first records."""

import math
from typing import NamedTuple

from msgspec import Struct, field

from twin.serving.requests import Limits

KEPT_RECORDS = 1000
KEPT_REJECTIONS = 100

GROWTH = 1.01  # each bucket of a histogram is so much wider than the one before
NOTHING = 1e-15  # what is smaller counts as 0
NAMED_QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}

_PER_LOG = 1 / math.log(GROWTH)
_SHIFT = 3500.377  # makes every index of a bucket positive, and no round number the edge of one

POINTS = 512
FIRST_BIN_S = 2.0**-10  # bins of time are powers of two seconds long, so that their edges are exact
FULL = 1 - 1e-9  # share of all bins that may be filled: rounding at the end must not double bins
SLIVER = 1e-6  # share of a bin below which a last one that is cut short is left out: rounding, no time


class RequestRecord(Struct, frozen=True, kw_only=True, gc=False):
    """A request that got all its tokens. Times in seconds from the start of the simulation."""

    id: str | int
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int  # prompt tokens skipped at the first admission, because a shared prefix was cached
    queue_s: float  # from arrival to first admission
    ttft_s: float  # from arrival to the first token
    tpot_s: float | None  # mean time between tokens after the first; None of a single token
    e2e_s: float  # from arrival to the last token
    preemptions: int


class Rejection(Struct, frozen=True, kw_only=True, gc=False):
    """A request that can never run."""

    id: str | int
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    kind: str  # `max_model_tokens` or `pool`: what it is too long for
    reason: str
    line: int


class Steps(NamedTuple):
    """Engine steps in a row: `steps` decode steps of one batch, or one step with prefill in it."""

    start_s: float
    end_s: float
    steps: int
    decoding: int  # sequences that gain tokens in every one of these steps
    running: int  # sequences that hold blocks, unfinished prefills included
    prefill_tokens: int


class Histogram:
    """Positive numbers with whole weights: quantiles within 0.5 %; count, mean and extremes exact.

    Buckets grow by 1 % each, and a quantile is the middle of its bucket: off by (1.01 - 1) / (1.01 + 1) = 0.4975 % at
    most. From 1e-15 to 1e12 there are 6,250 buckets, and only those with something in them are kept.
    """

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
        rank = max(1, math.ceil(share * self.count - 1e-9))
        seen = 0
        for middle, weight in self.buckets().items():
            seen += weight
            if seen >= rank:
                return min(max(middle, self.least), self.most)
        return self.most if self.count else math.nan

    def summary(self) -> dict[str, float | None]:
        """p50, p90, p99, mean, min and max; None of nothing."""
        if not self.count:
            return dict.fromkeys((*NAMED_QUANTILES, "mean", "min", "max"))
        quantiles = {name: self.quantile(share) for name, share in NAMED_QUANTILES.items()}
        return {**quantiles, "mean": self.mean, "min": self.least, "max": self.most}

    def buckets(self) -> dict[float, int]:
        """Middle of every bucket that holds something, and how much, in order."""
        return {_middle(bucket): self._buckets[bucket] for bucket in sorted(self._buckets)}


def _bucket(value: float) -> int:
    return int(math.log(value) * _PER_LOG + _SHIFT) if value > NOTHING else 0


def _middle(bucket: int) -> float:
    return math.exp((bucket - _SHIFT) / _PER_LOG) * 2 * GROWTH / (1 + GROWTH) if bucket else 0.0


def _counted_to(bucket: int, low: float, rise: float, done: int, count: int) -> int:
    """How many numbers of the progression from `low` on lie below the end of `bucket`; `done` lie below its start."""
    end = math.exp((bucket + 1 - _SHIFT) / _PER_LOG) if bucket else NOTHING
    reached = min(max(int((end - low) / rise) + 1, done + 1), count)
    while reached > done + 1 and _bucket(low + rise * (reached - 1)) > bucket:
        reached -= 1
    while reached < count and _bucket(low + rise * reached) <= bucket:
        reached += 1
    return reached


class Residency:
    """Sequences x seconds in at most 512 bins; when the time outgrows the bins, two at a time become one."""

    __slots__ = ("_areas", "area", "bin_s", "most")

    def __init__(self) -> None:
        self.bin_s = FIRST_BIN_S
        self.area = 0.0
        self.most = 0
        self._areas = [0.0] * POINTS

    def add(self, start_s: float, end_s: float, running: int) -> None:
        """So many sequences were running from `start_s` to `end_s`."""
        self.area += running * (end_s - start_s)
        self.most = max(self.most, running)
        while end_s >= self.bin_s * POINTS * FULL:
            self._halve()
        width = self.bin_s
        first, last = int(start_s / width), int(end_s / width)
        areas = self._areas
        if first == last:
            areas[first] += running * (end_s - start_s)
            return
        areas[first] += running * ((first + 1) * width - start_s)
        for index in range(first + 1, last):
            areas[index] += running * width
        areas[last] += running * (end_s - last * width)

    def points(self, total_s: float) -> tuple[tuple[float, float], ...]:
        """Start and mean of every bin up to `total_s`; the last may be cut short."""
        width = self.bin_s
        count = min(POINTS, int(total_s / width) + 1)
        spans = ((index * width, min(width, total_s - index * width)) for index in range(count))
        areas = zip(self._areas, spans, strict=False)
        return tuple((start, area / span) for area, (start, span) in areas if span > width * SLIVER)

    def _halve(self) -> None:
        areas = self._areas
        pairs = [areas[index] + areas[index + 1] for index in range(0, POINTS, 2)]
        self._areas = pairs + [0.0] * (POINTS // 2)
        self.bin_s *= 2


class ServingResult(Struct, kw_only=True):
    """A whole simulation: filled in while it runs, and its answer at the end."""

    limits: Limits
    pool_blocks: int
    pool_peak_blocks: int = 0  # most blocks in use at once; what only the prefix cache still knows is not in use
    total_s: float = 0.0  # from time 0 to the end of the last step
    busy_s: float = 0.0  # of these, seconds in which a step ran
    steps: int = 0
    completed: int = 0
    prompt_tokens: int = 0  # of completed requests, as are `output_tokens` and `cached_tokens`
    output_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0  # tokens whose cache was given up by preemptions
    ttft_s: Histogram = field(default_factory=Histogram)
    itl_s: Histogram = field(default_factory=Histogram)
    """Between two deliveries of tokens to one request, as a streaming client measures it."""
    tpot_s: Histogram = field(default_factory=Histogram)
    e2e_s: Histogram = field(default_factory=Histogram)
    queue_s: Histogram = field(default_factory=Histogram)
    residency: Residency = field(default_factory=Residency)
    requests: list[RequestRecord] = field(default_factory=list)  # the first completed, at most `KEPT_RECORDS`
    rejected: dict[str, int] = field(default_factory=dict)  # how many of each kind
    rejections: list[Rejection] = field(default_factory=list)  # the first of them, at most `KEPT_REJECTIONS`

    def finish(self, record: RequestRecord) -> None:
        """A request got its last token."""
        self.completed += 1
        self.prompt_tokens += record.prompt_tokens
        self.output_tokens += record.output_tokens
        self.cached_tokens += record.cached_tokens
        self.queue_s.add(record.queue_s)
        self.ttft_s.add(record.ttft_s)
        self.e2e_s.add(record.e2e_s)
        if record.tpot_s is not None:
            self.tpot_s.add(record.tpot_s)
        if len(self.requests) < KEPT_RECORDS:
            self.requests.append(record)

    def reject(self, rejection: Rejection) -> None:
        """A request can never run."""
        self.rejected[rejection.kind] = self.rejected.get(rejection.kind, 0) + 1
        if len(self.rejections) < KEPT_REJECTIONS:
            self.rejections.append(rejection)

    @property
    def resident_max(self) -> int:
        """Most sequences that were running at once."""
        return self.residency.most

    @property
    def resident_mean(self) -> float:
        """Running sequences, on average over `total_s`."""
        return self.residency.area / self.total_s if self.total_s else 0.0

    @property
    def timeline(self) -> tuple[tuple[float, float], ...]:
        """Start of a bin in seconds and mean residents in it; at most 512 bins, all of `residency.bin_s`."""
        return self.residency.points(self.total_s)

    @property
    def output_tokens_per_s(self) -> float:
        """Output tokens over the whole time."""
        return self.output_tokens / self.total_s if self.total_s else 0.0

    @property
    def requests_per_s(self) -> float:
        """Completed requests over the whole time."""
        return self.completed / self.total_s if self.total_s else 0.0

    @property
    def rejected_count(self) -> int:
        """Rejected requests of all kinds."""
        return sum(self.rejected.values())
