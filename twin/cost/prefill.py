"""A whole prefill from few of its chunks: a chunk's time is a smooth function of its position between steps.

The steps are where the number of staging buckets changes or another way of reading sets in. Chunks between two steps
form a run. The steps come back in the same order period after period, so that a period's mean is smooth again. A line
over the chunks of a run, or over the means of many periods, is checked at its middle and halved where it bends.
"""

import math
from collections.abc import Callable, Iterator

from twin.ask.case import Case
from twin.operations.ops import Step

STRAIGHT = 2e-4  # largest relative distance of a line's middle from the truth at which the line is kept
Weights = dict[int, float]  # how many chunks each simulated chunk stands for, by the chunk's index


def prefilled_tokens(case: Case, prompt_tokens: int) -> int:
    """Prompt tokens that prefill passes over: not those in the prefix cache, nor what is left for the first step."""
    return max(0, prompt_tokens - case.cached_tokens - case.rules.unprefilled_tokens)


def chunk_count(case: Case, prompt_tokens: int) -> int:
    """Passes that a prompt takes."""
    return -(-prefilled_tokens(case, prompt_tokens) // case.chunk_tokens)


def chunk_at(case: Case, prompt_tokens: int, index: int) -> Step:
    """Step number `index` of a prompt's prefill; the last may be shorter."""
    before = index * case.chunk_tokens
    q_tokens = min(case.chunk_tokens, prefilled_tokens(case, prompt_tokens) - before)
    return Step(kv_tokens=case.cached_tokens + before, q_tokens=q_tokens, batch=case.question.batch)


def sample(case: Case, prompt_tokens: int, seconds: Callable[[int], float]) -> Weights:
    """Indices of the chunks to simulate and the number of chunks each stands for; `seconds` simulates one."""
    weights: Weights = {}
    count = chunk_count(case, prompt_tokens)
    if count == 0:
        return weights
    full = prefilled_tokens(case, prompt_tokens) // case.chunk_tokens
    if full < count:
        weights[count - 1] = 1.0
    for start, stop in _stretches(case, full):
        _Stretch(case, seconds).sample(start, stop, weights)
    return weights


def _stretches(case: Case, full: int) -> Iterator[tuple[int, int]]:
    """Full chunks from one change of structure to the next; between them only the number of buckets grows."""
    chunk = case.chunk_tokens
    budget = case.indexer.budget if case.indexer else 0
    first_full_budget = -(-budget // chunk) * chunk  # query tokens before it may see fewer tokens than the budget
    threshold = case.indexer.threshold_tokens if case.indexer else 0
    reaches = {mixer.reach for mixer in case.model.caches}
    breaks = sorted({threshold, first_full_budget, *reaches, *case.layout.breaks(case)})
    start = 0
    for stop in (*(min(position // chunk, full) for position in breaks), full):
        if stop > start:
            yield start, stop
            start = stop


class _Stretch:
    """Chunks of one structure. Overlapped copies bend a run where it turns from bound by copies to bound by kernels."""

    def __init__(self, case: Case, seconds: Callable[[int], float]) -> None:
        self.seconds = seconds
        self.chunk_tokens = case.chunk_tokens
        self.bucket_tokens = case.layout.bucket_tokens(case)
        self.bends = case.copies == "overlapped"

    def sample(self, start: int, stop: int, weights: Weights) -> None:
        """Whole periods by a line over their means; what is left at both ends run by run."""
        period = self.bucket_tokens // math.gcd(self.bucket_tokens, self.chunk_tokens) or stop
        first, last = -(-start // period) * period, stop // period * period
        if last - first < 2 * period:
            first = last = stop
        self._sample_runs(start, first, weights)
        self._sample_runs(last, stop, weights)
        inside: dict[int, Weights] = {}

        def mean(begin: int) -> float:
            if begin not in inside:
                inside[begin] = self._sample_runs(begin, begin + period, {})
            return sum(self.seconds(chunk) * times for chunk, times in inside[begin].items()) / period

        periods: Weights = {}
        _spread(range(first, last, period), mean, periods)
        for begin, times in periods.items():
            mean(begin)
            for chunk, share in inside[begin].items():
                weights[chunk] = weights.get(chunk, 0.0) + share * times

    def _sample_runs(self, start: int, stop: int, weights: Weights) -> Weights:
        """Of each run the one or two chunks in its middle, or as many as it takes where it is long or may bend."""
        for run in self._runs(start, stop):
            if self.bends or run[-1] > 2 * run[0]:
                _spread(run, self.seconds, weights)
            else:
                _halve(run[(len(run) - 1) // 2 : len(run) // 2 + 1], weights, of=len(run))
        return weights

    def _runs(self, start: int, stop: int) -> Iterator[range]:
        """Chunks start..stop, run by run: another begins where another bucket does."""
        while start < stop:
            end = stop
            if self.bucket_tokens:
                bucket = -(-(start + 1) * self.chunk_tokens // self.bucket_tokens)
                end = min(max(start + 1, bucket * self.bucket_tokens // self.chunk_tokens), stop)
            yield range(start, end)
            start = end


def _spread(points: range, value: Callable[[int], float], weights: Weights) -> None:
    """A line over evenly spaced points, halved where it bends: what is linear in the position is summed exactly."""
    if len(points) > 2:
        middle = (len(points) - 1) // 2
        share = middle / (len(points) - 1)
        line = value(points[0]) * (1 - share) + value(points[-1]) * share
        if abs(line - value(points[middle])) > STRAIGHT * value(points[middle]):
            _spread(points[: middle + 1], value, weights)
            _spread(points[middle + 1 :], value, weights)
            return
    _halve(points, weights, of=len(points))


def _halve(points: range, weights: Weights, *, of: int) -> None:
    """The first and the last point stand for half of so many each: their mean is that of a line."""
    if points:
        for point in (points[0], points[-1]):
            weights[point] = weights.get(point, 0.0) + of / 2
