"""A whole prefill from few of its chunks: a chunk's time is a smooth function of its position between steps.

The steps are where the number of staging buckets changes or another way of reading sets in. Chunks between two steps
form a run. A line over the chunks of a long run, or over the means of many short ones, is checked at its middle and cut
in two where it bends.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from twin.case import Case
from twin.counts import sparse_threshold
from twin.layouts.layout import Pass

STRAIGHT = 2e-4
"""Largest relative distance of a line's middle from the truth at which the line is kept."""

Weights = dict[int, float]
"""How many chunks each simulated chunk stands for, by the chunk's index."""


def prefilled_tokens(case: Case, prompt_tokens: int) -> int:
    """Prompt tokens that prefill passes over; the engine leaves the last for the first decode step."""
    return max(0, prompt_tokens - case.rules.prefilled_short_of)


def chunk_count(case: Case, prompt_tokens: int) -> int:
    """Passes that a prompt takes."""
    return -(-prefilled_tokens(case, prompt_tokens) // case.chunk_tokens)


def chunk_at(case: Case, prompt_tokens: int, index: int) -> Pass:
    """Pass number `index` of a prompt's prefill; the last may be shorter."""
    past = index * case.chunk_tokens
    rows = min(case.chunk_tokens, prefilled_tokens(case, prompt_tokens) - past)
    return Pass(past=past, rows=rows, batch=case.question.batch)


def sample(case: Case, prompt_tokens: int, seconds: Callable[[int], float]) -> Weights:
    """Indices of the chunks to simulate and the number of chunks each stands for; `seconds` simulates one."""
    weights: Weights = {}
    count = chunk_count(case, prompt_tokens)
    if count == 0:
        return weights
    full = prefilled_tokens(case, prompt_tokens) // case.chunk_tokens
    if full < count:
        weights[count - 1] = 1.0
    for family in _families(case, full):
        _sample_family(family, seconds, weights, bends=case.copies == "overlapped")
    return weights


Run = range
"""Consecutive chunks of one structure."""


def _families(case: Case, full: int) -> Iterator[list[Run]]:
    """Runs of full chunks between two changes of structure; within a family only the number of buckets grows."""
    chunk = case.chunk_tokens
    budget = case.model.indexer.budget if case.model.indexer else 0
    first_full_budget = -(-budget // chunk) * chunk  # rows before it may see fewer tokens than the budget
    breaks = sorted({sparse_threshold(case.model), first_full_budget, *case.layout.breaks(case)})
    start = 0
    for stop in (*(min(position // chunk, full) for position in breaks), full):
        if stop > start:
            yield from _runs(start, stop, case.layout.bucket_tokens(case), chunk)
            start = stop


def _runs(start: int, stop: int, bucket_tokens: int, chunk: int) -> Iterator[list[Run]]:
    """Chunks start..stop cut where another bucket begins; a last run cut short stands alone, off the others' line."""
    family: list[Run] = []
    while start < stop:
        bucket = -(-(start + 1) * chunk // bucket_tokens) if bucket_tokens else 0
        end = min(max(start + 1, bucket * bucket_tokens // chunk), stop) if bucket_tokens else stop
        family.append(range(start, end))
        start = end
    if len(family) > 1 and len(family[-1]) < len(family[-2]):
        yield family[:-1]
        yield family[-1:]
    else:
        yield family


def _sample_family(runs: list[Run], seconds: Callable[[int], float], weights: Weights, *, bends: bool) -> None:
    """A line over the means of the runs. A run's mean is that of its two ends, unless it is alone or may bend inside.

    Overlapped copies `bends` a run where it turns from bound by copies to bound by kernels.
    """
    inside: dict[int, Weights] = {}

    def mean(point: int) -> float:
        run = runs[point]
        if point not in inside:
            inside[point] = _over_chunks(run, seconds) if bends or len(runs) == 1 else _ends(run)
        return sum(seconds(chunk) * times for chunk, times in inside[point].items()) / len(run)

    if len(runs) == 1:
        mean(0)
        over_runs: Weights = {0: len(runs[0])}
    else:
        centres = [(run.start + run.stop - 1) / 2 for run in runs]
        over_runs = _Line(value=mean, at=centres, lengths=[len(run) for run in runs]).sample()
    for point, chunks in over_runs.items():
        mean(point)
        for chunk, times in inside[point].items():
            _add(weights, chunk, times * chunks / len(runs[point]))


def _ends(run: Run) -> Weights:
    ends: Weights = {}
    _add(ends, run.start, len(run) / 2)
    _add(ends, run.stop - 1, len(run) / 2)
    return ends


def _over_chunks(run: Run, seconds: Callable[[int], float]) -> Weights:
    line = _Line(value=lambda point: seconds(run[point]), at=run, lengths=[1] * len(run))
    return {run[point]: times for point, times in line.sample().items()}


class _Line(NamedTuple):
    """Points at positions `at`, each standing for `lengths` chunks; what is linear in position is summed exactly."""

    value: Callable[[int], float]
    at: Sequence[float]
    lengths: Sequence[int]

    def sample(self) -> Weights:
        """Spread all points over those where the line bends."""
        weights: Weights = {}
        self._spread(0, len(self.at) - 1, weights)
        return weights

    def _spread(self, low: int, high: int, weights: Weights) -> None:
        middle = (low + high) // 2
        if high - low > 1:
            share = self._share(middle, low, high)
            line = self.value(low) * (1 - share) + self.value(high) * share
            if abs(line - self.value(middle)) > STRAIGHT * self.value(middle):
                self._spread(low, middle, weights)
                self._spread(middle + 1, high, weights)
                return
        points = range(low, high + 1)
        to_high = sum(self.lengths[point] * self._share(point, low, high) for point in points)
        _add(weights, low, sum(self.lengths[point] for point in points) - to_high)
        _add(weights, high, to_high)

    def _share(self, point: int, low: int, high: int) -> float:
        return (self.at[point] - self.at[low]) / (self.at[high] - self.at[low]) if high > low else 0.0


def _add(weights: Weights, point: int, times: float) -> None:
    if times:
        weights[point] = weights.get(point, 0.0) + times
